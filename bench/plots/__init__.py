"""Plots of runs and studies."""
