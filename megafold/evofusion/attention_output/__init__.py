"""What follows an attention: gate, output projection, shared dropout, residual."""
