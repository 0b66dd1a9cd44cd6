// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
)

// plugin is the key of the plugin's processor time among the services' names.
const plugin = "plugin"

// workingServices are the processes of a node that take part in ADD or DEL.
var workingServices = append(slices.Clone(measuredServices), devnode.Etcd)

// cpuTimes are user and system times by process.
type cpuTimes map[string]time.Duration

// servicesCPU returns the processor time of each service of a node since its start. It returns none for a
// reference network, which has no node.
func servicesCPU(node *devnode.Node) (cpuTimes, error) {
	times := cpuTimes{}
	if node == nil {
		return times, nil
	}
	for _, service := range workingServices {
		used, err := serviceCPU(node, service)
		if err != nil {
			return nil, err
		}
		times[service] = used
	}
	return times, nil
}

// serviceCPU reads the processor clock of a process in nanoseconds. It includes all threads, also ended ones.
func serviceCPU(node *devnode.Node, service string) (time.Duration, error) {
	pid, err := node.PID(service)
	if err != nil {
		return 0, err
	}
	// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers.h
	const sched = 2
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|sched, &used); err != nil {
		return 0, fmt.Errorf("read the processor time of %s (%d): %w", service, pid, err)
	}
	return time.Duration(used.Nano()), nil
}

// addDifference adds the processor time between two readings.
func (t cpuTimes) addDifference(before, after cpuTimes) {
	for service, used := range after {
		t[service] += used - before[service]
	}
}

func (t cpuTimes) sum() time.Duration {
	var sum time.Duration
	for _, used := range t {
		sum += used
	}
	return sum
}

// printCPU prints the mean processor time of ADD and DEL by process. The ratio is to the network at the position of
// base.
func (b *bench) printCPU(networks []network, times []attachmentTimes, base int) {
	fmt.Fprintln(b.out,
		"Processor time of one call in ms, user and system, mean of all calls. The plugin's time includes programs that it "+
			"executes. Kernel work that runs later or in other contexts is not included.")
	fmt.Fprintln(b.out)
	fmt.Fprintf(b.out,
		"| network | command | plugin | %s | all | ratio to %s |\n",
		strings.Join(workingServices, " | "),
		networks[base].name)
	fmt.Fprintln(b.out, "|---|---|---|"+strings.Repeat("---|", len(workingServices))+"---|---|")
	for _, command := range []struct {
		name string
		of   func(attachmentTimes) commandTimes
	}{
		{"ADD", func(t attachmentTimes) commandTimes { return t.add }},
		{"DEL", func(t attachmentTimes) commandTimes { return t.del }},
	} {
		toBase := command.of(times[base]).meanCPU()
		for i, n := range networks {
			t := command.of(times[i])
			fmt.Fprintf(b.out, "| %s | %s |", n.name, command.name)
			for _, process := range append([]string{plugin}, workingServices...) {
				if used, ok := t.cpu[process]; ok {
					fmt.Fprintf(b.out, " %.2f |", float64(used)/float64(len(t.wall))/float64(time.Millisecond))
				} else {
					fmt.Fprint(b.out, " – |")
				}
			}
			fmt.Fprintf(b.out, " %.2f | %.2f |\n", float64(t.meanCPU())/float64(time.Millisecond),
				float64(t.meanCPU())/float64(toBase))
		}
	}
	fmt.Fprintln(b.out)
}
