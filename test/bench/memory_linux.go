// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/devnode"
)

// measuredServices are the processes of Sluice itself, without etcd.
var measuredServices = []string{devnode.Identity, devnode.IPAM, devnode.Policy, devnode.Datapath}

// usage is a process's memory in MiB.
type usage struct {
	resident, anonymous float64
	largest             float64 // resident, since the start of the process
}

// memory reads the memory of the services of a node.
func memory(node *devnode.Node) (map[string]usage, error) {
	all := make(map[string]usage)
	for _, service := range measuredServices {
		u, err := memoryOf(node, service)
		if err != nil {
			return nil, err
		}
		all[service] = u
	}
	return all, nil
}

// memoryOf reads the memory of one service of a node.
func memoryOf(node *devnode.Node, service string) (u usage, err error) {
	pid, err := node.PID(service)
	if err != nil {
		return u, err
	}
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseFloat(fields[1], 64)
		switch fields[0] {
		case "VmRSS:":
			u.resident = kib / 1024
		case "RssAnon:":
			u.anonymous = kib / 1024
		case "VmHWM:":
			u.largest = kib / 1024
		}
	}
	return u, nil
}
