"""What Prometheus and Grafana see: the metrics, their export, dashboard and alert rules."""
