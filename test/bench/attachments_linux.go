// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// commandTimes are the durations of the calls of one command.
type commandTimes struct {
	wall samples
	cpu  cpuTimes // of all calls
}

// meanCPU returns the mean processor time of a call, summed over all processes.
func (t commandTimes) meanCPU() time.Duration {
	return t.cpu.sum() / time.Duration(max(len(t.wall), 1))
}

// attachmentTimes are the times of one network.
type attachmentTimes struct{ add, del commandTimes }

// attachments measures ADD and DEL by executing the plugins as a runtime does, first one at a time, then eight at a
// time.
func (b *bench) attachments(ctx context.Context) (err error) {
	// A pod whose policy tables are already in the kernel, because the first pod stays.
	undo, err := b.guard(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, undo()) }()
	guarded, err := b.labelled("sluice, both families, policies", "role", "server")
	if err != nil {
		return err
	}
	first, err := guarded.connect(ctx, b.prefix+"-first")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, guarded.disconnect(context.WithoutCancel(ctx), first)) }()

	networks := append([]network{b.sluice}, b.peers...)
	networks = append(networks, b.dualStack, guarded)
	for _, atOnce := range []int{1, 8} {
		count := b.sizes.pods
		if atOnce > 1 {
			count = b.sizes.parallelPods
		}
		times := make([]attachmentTimes, len(networks))
		for round := range b.sizes.rounds {
			for i, n := range networks {
				if err := b.attachAndDetach(ctx, n, fmt.Sprintf("%s-%d-%d-%d", b.prefix, atOnce, round, i),
					max(count/n.divisor, 1), atOnce, &times[i]); err != nil {
					return err
				}
			}
		}
		fmt.Fprintf(b.out, "%d at a time, interleaved in %d rounds; IPv4 only unless noted:\n\n", atOnce,
			b.sizes.rounds)
		const ptp = 1
		b.printAttachments(networks, times, ptp)
		b.printCPU(networks, times, ptp)
		b.judgeAttachments(atOnce, times[0], times[ptp], times[len(times)-2], times[len(times)-1])
	}
	return nil
}

// printAttachments prints the durations. Ratios are to the network at the
// position of base.
func (b *bench) printAttachments(networks []network, times []attachmentTimes, base int) {
	name := networks[base].name
	fmt.Fprintf(b.out,
		"| network | pods | ADD p50 | ADD p99 | ADD worst | ADD p50 ratio to %s | DEL p50 | DEL p99 | DEL worst | "+
			"DEL p50 ratio to %s |\n",
		name, name)
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|---|")
	for i, n := range networks {
		fmt.Fprintf(b.out, "| %s | %d |", n.name, len(times[i].add.wall))
		for _, pair := range [][2]samples{
			{times[i].add.wall, times[base].add.wall}, {times[i].del.wall, times[base].del.wall},
		} {
			of, to := pair[0], pair[1]
			fmt.Fprintf(b.out,
				" %s | %s | %s | %.2f |",
				milliseconds(of.quantile(0.5)), milliseconds(of.quantile(0.99)),
				milliseconds(of.worst()), ratio(of.quantile(0.5), to.quantile(0.5)))
		}
		fmt.Fprintln(b.out)
	}
	fmt.Fprintln(b.out)
}

// judgeAttachments compares the times with the targets.
func (b *bench) judgeAttachments(atOnce int, sluice, ptp, dualStack, guarded attachmentTimes) {
	add, del := sluice.add.wall, sluice.del.wall
	if atOnce > 1 {
		b.wantRatio(fmt.Sprintf("ADD p50 to ptp + host-local, IPv4 alone, %d at a time", atOnce), 0.8,
			ratio(add.quantile(0.5), ptp.add.wall.quantile(0.5)))
		b.wantTime(fmt.Sprintf("ADD p50, %d at a time", atOnce), 40*time.Millisecond, add.quantile(0.5))
		b.wantRatio(fmt.Sprintf("DEL worst to ptp + host-local, IPv4 alone, %d at a time", atOnce), 1,
			ratio(del.worst(), ptp.del.wall.worst()))
		b.wantTime(fmt.Sprintf("DEL worst, %d at a time", atOnce), 100*time.Millisecond, del.worst())
		return
	}
	b.wantTime("processor time of an ADD", 10*time.Millisecond, sluice.add.meanCPU())
	b.wantTime("processor time of a DEL", 5*time.Millisecond, sluice.del.meanCPU())
	b.wantTime("ADD p50 of a subject whose tables are in the kernel, above one without policy", 500*time.Microsecond,
		guarded.add.wall.quantile(0.5)-add.quantile(0.5))
	b.wantTime("ADD p50, one at a time", 10*time.Millisecond, add.quantile(0.5))
	b.wantTime("ADD p99, one at a time", 25*time.Millisecond, add.quantile(0.99))
	b.wantTime("DEL p50, one at a time", 10*time.Millisecond, del.quantile(0.5))
	for _, other := range []struct {
		name  string
		times attachmentTimes
	}{{"ptp + host-local, IPv4 alone", ptp}, {"ptp + host-local, both families", dualStack}} {
		b.wantRatio("ADD p50 to "+other.name, 1, ratio(add.quantile(0.5), other.times.add.wall.quantile(0.5)))
		b.wantRatio("DEL p50 to "+other.name, 1, ratio(del.quantile(0.5), other.times.del.wall.quantile(0.5)))
	}
}

// attachAndDetach connects count pods, then disconnects them. The measured times do not include creating and removing
// the namespaces.
func (b *bench) attachAndDetach(ctx context.Context, n network, prefix string, count, atOnce int,
	times *attachmentTimes,
) (err error) {
	pods := make([]pod.Pod, count)
	defer func() {
		for _, p := range pods {
			if p.Netns != "" {
				err = errors.Join(err, pod.DeleteNetns(p.Netns))
			}
		}
	}()
	for i := range pods {
		id := fmt.Sprintf("%s-%d", prefix, i)
		p := pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
		if err := pod.NewNetns(p.Netns); err != nil {
			return err
		}
		pods[i] = p
	}
	for _, step := range []struct {
		command string
		into    *commandTimes
	}{{"ADD", &times.add}, {"DEL", &times.del}} {
		if step.into.cpu == nil {
			step.into.cpu = cpuTimes{}
		}
		before, err := servicesCPU(n.node)
		if err != nil {
			return err
		}
		var mu sync.Mutex
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(atOnce)
		for _, p := range pods {
			group.Go(func() error {
				begin := time.Now()
				_, cpu, err := n.call(ctx, step.command, p.Name, p.Netns)
				elapsed := time.Since(begin)
				if err != nil {
					return fmt.Errorf("%s: %s: %w", n.name, step.command, err)
				}
				mu.Lock()
				defer mu.Unlock()
				step.into.wall = append(step.into.wall, elapsed)
				step.into.cpu[plugin] += cpu
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		after, err := servicesCPU(n.node)
		if err != nil {
			return err
		}
		step.into.cpu.addDifference(before, after)
	}
	return nil
}
