"""The Helm chart, rendered by Helm's own engine and checked against the schemas of Kubernetes. No cluster is needed."""
