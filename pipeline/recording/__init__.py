"""A request as traces have it, and live traffic as a trace."""
