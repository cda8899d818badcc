"""Hooks that make new values of secrets (`ports.RotationHook`): `http`, anybody's endpoint; `aws_iam`, access keys.

Rule: everything they fetch goes through `ports.Outbound`. Errors say why, and nothing that was sent or answered.
"""
