"""Faster layers behind the same stages: `xla` runs anywhere, `te` needs Transformer Engine and a Hopper GPU or newer."""
