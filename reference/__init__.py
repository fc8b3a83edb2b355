"""Plain jnp: the baseline, its teaching siblings, and the float64 oracles that judge both sides."""
