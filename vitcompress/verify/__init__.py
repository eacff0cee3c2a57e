"""Checks that an artifact computes what its model computes, and holds its weights."""

from vitcompress.verify.folder import verify_folder

__all__ = ["verify_folder"]
