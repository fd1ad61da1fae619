"""Pure tensor arithmetic: norms and the loss scale."""
