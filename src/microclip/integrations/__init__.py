"""microclip in transformers, Accelerate and Lightning; each module needs its extra installed."""
