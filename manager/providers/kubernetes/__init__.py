"""Pods in a Kubernetes cluster, in one namespace that is for nothing else."""
