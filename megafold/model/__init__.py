"""The stock model with its computation replaced: optimize(model, plan) and restore(model)."""
