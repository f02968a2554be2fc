"""microclip in the stacks that people train with; each module needs its extra installed."""
