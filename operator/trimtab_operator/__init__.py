"""Makes it run: custom resources become Deployments, Services and a status."""
