// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/devnode"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// lifecycle measures start, restart with endpoints, and memory.
func (b *bench) lifecycle(ctx context.Context) (err error) {
	idle, err := b.memory()
	if err != nil {
		return err
	}
	start, firstAdd, err := b.startAndFirstAdd(ctx)
	if err != nil {
		return err
	}

	var pods []pod.Pod
	defer func() {
		for _, p := range pods {
			err = errors.Join(err, b.sluice.disconnect(context.WithoutCancel(ctx), p))
		}
	}()
	connectUpTo := func(n int) error {
		for len(pods) < n {
			p, err := b.sluice.connect(ctx, fmt.Sprintf("%s-m-%d", b.prefix, len(pods)))
			if err != nil {
				return err
			}
			pods = append(pods, p)
		}
		return nil
	}
	if err := connectUpTo(b.sizes.endpoints / 2); err != nil {
		return err
	}
	restart, addAtStop, err := b.restart(ctx)
	if err != nil {
		return err
	}
	restartEndpoints := len(pods)
	if err := b.kernelObjects(ctx, restartEndpoints); err != nil {
		return err
	}
	if err := connectUpTo(b.sizes.endpoints); err != nil {
		return err
	}
	loaded, err := b.memory()
	if err != nil {
		return err
	}

	fmt.Fprintln(b.out, "| what | measured |")
	fmt.Fprintln(b.out, "|---|---|")
	fmt.Fprintf(b.out, "| datapath: process start → serving, median of %d | %s |\n", len(start),
		milliseconds(start.quantile(0.5)))
	fmt.Fprintf(b.out, "| first ADD after it, median | %s |\n", milliseconds(firstAdd.quantile(0.5)))
	fmt.Fprintf(b.out, "| restart with %d endpoints → all served again, median of %d | %s |\n", restartEndpoints,
		len(restart), milliseconds(restart.quantile(0.5)))
	fmt.Fprintf(b.out, "| an ADD issued at the stop, retried as runtimes do, median | %s |\n",
		milliseconds(addAtStop.quantile(0.5)))
	fmt.Fprintln(b.out)
	fmt.Fprintf(b.out, "Memory in MiB, as the kernel reports it in /proc/PID/status.\n\n")
	fmt.Fprintf(b.out, "| process | idle: resident / anonymous | %d endpoints: resident / anonymous |\n", len(pods))
	fmt.Fprintln(b.out, "|---|---|---|")
	var sum [4]float64
	for _, service := range measuredServices {
		i, l := idle[service], loaded[service]
		fmt.Fprintf(b.out, "| sluice-%s | %.1f / %.1f | %.1f / %.1f |\n", service, i.resident, i.anonymous, l.resident,
			l.anonymous)
		for k, v := range []float64{i.resident, i.anonymous, l.resident, l.anonymous} {
			sum[k] += v
		}
	}
	fmt.Fprintf(b.out, "| all | %.1f / %.1f | %.1f / %.1f |\n", sum[0], sum[1], sum[2], sum[3])

	b.wantTime("datapath: start to serving", 500*time.Millisecond, start.quantile(0.5))
	b.wantTime("first ADD after a start, like any other: within their p99", b.addP99, firstAdd.quantile(0.5))
	b.wantTime(fmt.Sprintf("restart with %d endpoints to all served", restartEndpoints), 500*time.Millisecond,
		restart.quantile(0.5))
	b.wantTime("ADD issued at the stop", 700*time.Millisecond, addAtStop.quantile(0.5))
	b.wantMemory("resident, all processes, idle", 120, sum[0])
	b.wantMemory("anonymous, all processes, idle", 70, sum[1])
	b.wantMemory(fmt.Sprintf("growth of resident memory with %d endpoints", len(pods)), 5, sum[2]-sum[0])
	return nil
}

// kernelObjects reports maps and programs.
func (b *bench) kernelObjects(ctx context.Context, endpoints int) error {
	status, err := b.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	var bytes uint64
	fmt.Fprintf(b.out, "Maps with %d endpoints, as the kernel accounts them:\n\n", endpoints)
	fmt.Fprintln(b.out, "| map | entries | of | KiB |")
	fmt.Fprintln(b.out, "|---|---|---|---|")
	for _, m := range status.GetMaps() {
		bytes += m.GetBytes()
		fmt.Fprintf(b.out, "| %s | %d | %d | %d |\n", m.GetName(), m.GetEntries(), m.GetMaxEntries(), m.GetBytes()>>10)
	}
	fmt.Fprintf(b.out, "| all %d | | | %d |\n\n", len(status.GetMaps()), bytes>>10)
	b.wantMemory(fmt.Sprintf("kernel memory of all maps with %d endpoints", endpoints), 40, float64(bytes)/(1<<20))
	b.wantCount("maps", 40, len(status.GetMaps()))

	pins, err := filepath.Glob(filepath.Join(b.node.Paths().BPFDir, "sluice_*"))
	if err == nil && len(pins) == 0 {
		err = fmt.Errorf("no pinned program in %s", b.node.Paths().BPFDir)
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(b.out, "| program, shared by all endpoints | instructions | walked by the verifier |")
	fmt.Fprintln(b.out, "|---|---|---|")
	for _, pin := range pins {
		if err := b.describeProgram(pin); err != nil {
			return err
		}
	}
	fmt.Fprintln(b.out)
	return nil
}

func (b *bench) describeProgram(pin string) error {
	prog, err := ebpf.LoadPinnedProgram(pin, nil)
	if err != nil {
		return fmt.Errorf("open program %s: %w", pin, err)
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return fmt.Errorf("look at program %s: %w", pin, err)
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return fmt.Errorf("look at program %s: %w", pin, err)
	}
	const instruction = 8 // bytes
	walked, _ := info.VerifiedInstructions()
	fmt.Fprintf(b.out, "| %s | %d | %d |\n", info.Name, size/instruction, walked)
	return nil
}

// startAndFirstAdd stops and starts the datapath without endpoints.
func (b *bench) startAndFirstAdd(ctx context.Context) (start, firstAdd samples, err error) {
	for i := range b.sizes.rounds {
		if err := b.node.Stop(ctx, devnode.Datapath); err != nil {
			return nil, nil, err
		}
		elapsed, err := timed(func() error { return b.node.Start(ctx, devnode.Datapath) })
		if err != nil {
			return nil, nil, err
		}
		start = append(start, elapsed)
		id := fmt.Sprintf("%s-f-%d", b.prefix, i)
		if err := pod.NewNetns(pod.NetnsPath(id)); err != nil {
			return nil, nil, err
		}
		elapsed, err = timed(func() error {
			_, _, err := b.sluice.call(ctx, "ADD", id, pod.NetnsPath(id))
			return err
		})
		err = errors.Join(err, b.sluice.disconnect(ctx, pod.Pod{Name: id, Netns: pod.NetnsPath(id)}))
		if err != nil {
			return nil, nil, err
		}
		firstAdd = append(firstAdd, elapsed)
	}
	return start, firstAdd, nil
}

// restart stops and starts the datapath with endpoints, and measures an ADD
// that begins at the moment of the stop and is tried again until it succeeds.
func (b *bench) restart(ctx context.Context) (restart, add samples, err error) {
	for i := range b.sizes.rounds {
		id := fmt.Sprintf("%s-r-%d", b.prefix, i)
		if err := pod.NewNetns(pod.NetnsPath(id)); err != nil {
			return nil, nil, err
		}
		begin := time.Now()
		added := make(chan error, 1)
		var addTime time.Duration
		if err := b.node.Stop(ctx, devnode.Datapath); err != nil {
			return nil, nil, err
		}
		go func() {
			var err error
			for ctx.Err() == nil {
				if _, _, err = b.sluice.call(ctx, "ADD", id, pod.NetnsPath(id)); err == nil {
					break
				}
			}
			addTime = time.Since(begin)
			added <- err
		}()
		elapsed, err := timed(func() error { return b.node.Start(ctx, devnode.Datapath) })
		err = errors.Join(err, <-added)
		err = errors.Join(err, b.sluice.disconnect(ctx, pod.Pod{Name: id, Netns: pod.NetnsPath(id)}))
		if err != nil {
			return nil, nil, err
		}
		restart = append(restart, elapsed)
		add = append(add, addTime)
	}
	return restart, add, nil
}

// measuredServices are the processes of Sluice itself; etcd is the cluster's.
var measuredServices = []string{devnode.Identity, devnode.IPAM, devnode.Policy, devnode.Datapath}

// usage is a process's memory in MiB.
type usage struct{ resident, anonymous float64 }

func (b *bench) memory() (map[string]usage, error) {
	all := make(map[string]usage)
	for _, service := range measuredServices {
		pid, err := b.node.PID(service)
		if err != nil {
			return nil, err
		}
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return nil, err
		}
		var u usage
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
			}
		}
		all[service] = u
	}
	return all, nil
}
