from rljax.models.config import decoder
PRESETS = {"tiny-moe": lambda v: decoder(vocab_size=v, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, num_experts=4, top_k=2)}
