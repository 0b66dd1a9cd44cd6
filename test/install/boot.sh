#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors
#
# boot ROOT CGROUP: runs systemd in namespaces of its own, in the tree ROOT.
set -eu

root=$1 cgroup=$2
mkdir "$cgroup"
echo $$ >"$cgroup/cgroup.procs"
# shellcheck disable=SC2016 # the inner shell's words
exec unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child --propagation private bash -euc '
	root=$1
	mount --bind "$root" "$root"
	mount -t proc proc "$root/proc"
	mount -t sysfs sysfs "$root/sys"
	mount -t cgroup2 cgroup "$root/sys/fs/cgroup"
	mount -t tmpfs -o mode=755 tmpfs "$root/dev"
	for device in null zero full random urandom tty; do
		touch "$root/dev/$device"
		mount --bind "/dev/$device" "$root/dev/$device"
	done
	# As udev makes it.
	mkdir "$root/dev/net"
	mknod -m 0666 "$root/dev/net/tun" c 10 200
	mkdir "$root/dev/pts" "$root/dev/shm"
	mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
	ln -s pts/ptmx "$root/dev/ptmx"
	ln -s /proc/self/fd "$root/dev/fd"
	mount -t tmpfs -o mode=755 tmpfs "$root/run"
	mount -t tmpfs tmpfs "$root/tmp"
	cd "$root"
	pivot_root . mnt
	cd /
	umount -l /mnt
	# As on a machine; systemd leaves it to who makes a container.
	mount --make-rshared /
	exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd
' boot "$root" </dev/null >/dev/null
