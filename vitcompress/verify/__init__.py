"""Checks that the results of a run have the weights and outputs of its model."""
