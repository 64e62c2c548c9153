"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""
