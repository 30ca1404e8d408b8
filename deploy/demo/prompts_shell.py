"""Questions about command-line tools: many commands x places x ways to ask."""

from __future__ import annotations

import random

COMMANDS: tuple[str, ...] = tuple(
    """
    ls cp mv rm cat head tail less grep sed awk cut sort uniq wc tr tee xargs find locate which
    chmod chown chgrp ln mkdir rmdir touch stat file du df mount umount lsblk fdisk parted mkfs
    fsck dd rsync scp sftp ssh ssh-keygen ssh-copy-id curl wget ping traceroute dig nslookup host
    whois netstat ss ip ifconfig route arp nc nmap tcpdump iptables ufw systemctl journalctl
    service crontab at batch nohup nice renice kill killall pkill pgrep ps top htop free vmstat
    iostat uptime who w last id whoami su sudo passwd useradd usermod userdel groupadd groups tar
    gzip gunzip bzip2 xz zip unzip 7z zstd diff cmp comm patch vimdiff split paste join column fold
    nl tac rev shuf seq yes date cal bc expr printf echo env export alias history screen tmux watch
    time timeout sleep wait strace ltrace lsof gdb make cmake gcc g++ clang ld ar nm objdump strip
    python pip virtualenv pytest ruby gem perl php node npm yarn npx deno cargo rustc go java javac
    mvn gradle docker podman kubectl helm terraform ansible vagrant psql mysql sqlite3 redis-cli
    mongo ffmpeg convert identify exiftool pandoc pdftotext jq yq xmllint openssl gpg base64 md5sum
    sha256sum hexdump xxd od strings iconv dos2unix enscript lp lpr aspell fmt pr expand unexpand
    apt apt-get apt-cache dpkg snap flatpak yum dnf rpm pacman zypper brew lsmod modprobe dmesg
    uname hostname hostnamectl timedatectl localectl loginctl swapon swapoff mkswap blkid hdparm
    smartctl sensors lspci lsusb dmidecode vim nano emacs ed svn hg cvs rclone restic borg mosh
    telnet ftp lftp aria2c youtube-dl figlet cowsay fortune tree ncdu fzf rg fd bat exa
    """.split()  # noqa: SIM905
)
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (line.split(":")[0].strip(), tuple(line.split(":")[1].split()))
    for line in """
    git: add branch checkout clone commit diff fetch init log merge pull push rebase reset stash tag
    docker: build commit cp exec images inspect logs ps pull push rmi run save start stop tag
    kubectl: apply create delete describe edit exec get label logs rollout scale top
    npm: audit ci init install link publish run search test update version
    cargo: add bench build check clean doc fmt init install run test update
    apt: autoremove download install list purge remove search show update upgrade
    aws: cloudwatch ec2 ecr iam kms lambda rds route53 s3 sns sqs
    gh: auth browse config gist issue pr release repo run secret workflow
    systemctl: disable edit enable mask reload restart start status stop
    pip: check config download freeze install list show uninstall wheel
    go: build clean env fmt generate get install mod run test vet
    ip: address link neighbour netns route rule
    """.strip().splitlines()
)
PLACES: tuple[str, ...] = (
    "on Debian", "on Fedora", "on Arch Linux", "on Alpine", "on a server", "on a laptop",
    "on a Raspberry Pi", "in a script", "in a container", "in a terminal", "in a cron job",
    "in a large project", "in a home folder", "over a slow network", "as a normal user",
    "for the first time", "every day", "at work",
)  # fmt: skip
_FORMS: tuple[str, ...] = (
    "How do I use the command `{c}` {p}? Give short examples.",
    "How do I use the command `{c}` {p}? Give some short examples.",
    "How do I use the command `{c}` {p}? Give a few examples.",
    "How can I use the command `{c}` {p}? Give short examples.",
)


def make(rng: random.Random) -> str:
    """One prompt about a random command, in a place: no data set asks with one."""
    return rng.choice(_FORMS).format(c=_command(rng), p=rng.choice(PLACES))


def _command(rng: random.Random) -> str:
    if rng.random() < 0.4:
        family, parts = rng.choice(FAMILIES)
        return f"{family} {rng.choice(parts)}"
    return rng.choice(COMMANDS)
