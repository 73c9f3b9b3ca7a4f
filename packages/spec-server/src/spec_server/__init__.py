"""OpenAI- and Anthropic-compatible HTTP server for speculative decoding on MLX."""
