"""Checks that the results of a run have the weights and outputs of its model."""

from vitcompress.verify.folder import verify_folder

__all__ = ["verify_folder"]
