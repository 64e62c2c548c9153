"""TensorArray: the class, the ops and their gradients."""
