#!/bin/bash
# The preStop of a pod (or what to run on a host that is to go): Serve starts the replicas of this
# node elsewhere and ends those here when they have answered; then Ray ends.
#   drain.sh [SECONDS]   at most so long, 90 where nothing is said
seconds=${1:-90}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "this host is to go" \
  --deadline-remaining-seconds "$seconds" ||
  # the head may be gone already: what is under way here can be answered all the same
  echo "Serve was not told (is RAY_AUTH_MODE set?)" >&2
end=$((SECONDS + seconds))
while pgrep -f '^ray::ServeReplica:' > /dev/null && [ "$SECONDS" -lt "$end" ]; do
  sleep 1
done
ray stop --grace-period 20
