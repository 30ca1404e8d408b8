#!/bin/bash
# The first process of a host: runs in namespaces of its own, makes the host's own folders, then
# sshd. Its end is the end of everything on the host.
#   NAME  host name      OWN  folder with sshd_config, profile.sh, resources.json and root, the home
#   STORAGE  folder seen by every host as /srv/paceline     KEEP  further paths, one a line
set -euo pipefail

mount --make-rprivate /
mount -t proc proc /proc
hostname "$NAME"

# What lies in a folder that is replaced below goes through a stage outside of it.
mount -t tmpfs stage /mnt
mkdir /mnt/storage /mnt/own
mount --bind "$STORAGE" /mnt/storage
mount --bind "$OWN" /mnt/own
number=0
while IFS= read -r path; do
  mkdir "/mnt/$number"
  mount --rbind "$path" "/mnt/$number"
  number=$((number + 1))
done <<< "$KEEP"

for folder in /tmp /run /srv /dev/shm /etc/profile.d; do
  mount -t tmpfs -o mode=755 own "$folder"
done
mount --bind /mnt/own/root /root # as on any host, it is there again after the next start
chmod 1777 /tmp /dev/shm
mkdir -p /run/sshd /srv/paceline /srv/own
mount --bind /mnt/storage /srv/paceline
mount --bind /mnt/own /srv/own
number=0
while IFS= read -r path; do
  mkdir -p "$path"
  mount --rbind "/mnt/$number" "$path"
  number=$((number + 1))
done <<< "$KEEP"
umount -l /mnt

cp /srv/own/profile.sh /etc/profile.d/paceline.sh
mount --bind /srv/own/hosts /etc/hosts
mount --bind /srv/own/resolv.conf /etc/resolv.conf
/usr/sbin/sshd -D -e -f /srv/own/sshd_config &
while true; do
  wait || true # for sshd, and for every orphan in between
  sleep 1
done
