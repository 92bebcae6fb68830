"""What the processes do: tokenizer, encoder, scheduler; processors, model adapters, engine adapters."""
