"""Metrics, their export to Prometheus, a Grafana dashboard and alert rules."""
