"""Replicas of a stage agree on its gradients.

base.py    the contract
single.py  one replica: nothing to agree on
"""
