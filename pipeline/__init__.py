"""How processes live: deployment config, channels, handle broker, life cycle, supervision, telemetry, replay."""
