"""Runners: a StepPlan goes in, sampled tokens come out."""
