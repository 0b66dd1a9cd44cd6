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

// attachmentTimes are the durations of one network.
type attachmentTimes struct{ add, del samples }

// attachments measures ADD and DEL by executing the plugins as a runtime does,
// first one at a time, then eight at a time.
func (b *bench) attachments(ctx context.Context) (err error) {
	// A pod under policies whose tables are in the kernel already: the first
	// one stays.
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
				if err := b.attachAndDetach(ctx, n, fmt.Sprintf("%s-%d-%d-%d", b.prefix, atOnce, round, i), max(count/n.share, 1),
					atOnce, &times[i]); err != nil {
					return err
				}
			}
		}
		fmt.Fprintf(b.out, "%d at a time, interleaved in %d rounds; IPv4 alone where nothing else is said:\n\n", atOnce,
			b.sizes.rounds)
		fmt.Fprintln(b.out, "| network | pods | ADD p50 | ADD p99 | ADD p50 ratio to ptp | DEL p50 | DEL p99 | DEL worst | DEL p50 ratio to ptp |")
		fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|")
		ptp := times[1]
		for i, n := range networks {
			t := times[i]
			fmt.Fprintf(b.out, "| %s | %d | %s | %s | %.2f | %s | %s | %s | %.2f |\n", n.name, len(t.add),
				milliseconds(t.add.quantile(0.5)), milliseconds(t.add.quantile(0.99)),
				float64(t.add.quantile(0.5))/float64(ptp.add.quantile(0.5)),
				milliseconds(t.del.quantile(0.5)), milliseconds(t.del.quantile(0.99)), milliseconds(t.del.worst()),
				float64(t.del.quantile(0.5))/float64(ptp.del.quantile(0.5)))
		}
		fmt.Fprintln(b.out)
		b.judgeAttachments(atOnce, times[0], ptp, times[len(times)-2], times[len(times)-1])
	}
	return nil
}

// judgeAttachments holds the times against what is wanted.
func (b *bench) judgeAttachments(atOnce int, sluice, ptp, dualStack, guarded attachmentTimes) {
	if atOnce > 1 {
		b.wantTime(fmt.Sprintf("ADD p50, %d at a time", atOnce), 40*time.Millisecond, sluice.add.quantile(0.5))
		b.wantTime(fmt.Sprintf("DEL worst, %d at a time", atOnce), 100*time.Millisecond, sluice.del.worst())
		return
	}
	b.wantTime("ADD p50 of a subject whose tables are in the kernel, above one without policy", 500*time.Microsecond,
		guarded.add.quantile(0.5)-sluice.add.quantile(0.5))
	b.addP99 = sluice.add.quantile(0.99)
	b.wantTime("ADD p50, one at a time", 10*time.Millisecond, sluice.add.quantile(0.5))
	b.wantTime("ADD p99, one at a time", 25*time.Millisecond, b.addP99)
	b.wantTime("DEL p50, one at a time", 10*time.Millisecond, sluice.del.quantile(0.5))
	for _, other := range []struct {
		name  string
		times attachmentTimes
	}{{"ptp + host-local, IPv4 alone", ptp}, {"ptp + host-local, both families", dualStack}} {
		b.wantRatio("ADD p50 to "+other.name, 1, float64(sluice.add.quantile(0.5))/float64(other.times.add.quantile(0.5)))
		b.wantRatio("DEL p50 to "+other.name, 1, float64(sluice.del.quantile(0.5))/float64(other.times.del.quantile(0.5)))
	}
}

// attachAndDetach connects count pods, then disconnects them. The namespaces
// are made before and removed after, outside the measured times.
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
		into    *samples
	}{{"ADD", &times.add}, {"DEL", &times.del}} {
		var mu sync.Mutex
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(atOnce)
		for _, p := range pods {
			group.Go(func() error {
				elapsed, err := timed(func() error {
					_, err := n.call(ctx, step.command, p.Name, p.Netns)
					return err
				})
				if err != nil {
					return fmt.Errorf("%s: %s: %w", n.name, step.command, err)
				}
				mu.Lock()
				defer mu.Unlock()
				*step.into = append(*step.into, elapsed)
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}
