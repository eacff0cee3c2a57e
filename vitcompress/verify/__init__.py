"""Checks that an artifact computes what its model computes, and holds its weights."""
