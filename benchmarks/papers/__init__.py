"""Planners and policies of published systems that Trimtab is compared with."""
