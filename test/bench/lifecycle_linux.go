// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// crowd is a fresh node with capacity for many pods. It runs next to the benchmark's node, which has no pods
// meanwhile.
type crowd struct {
	bench   *bench
	node    *devnode.Node
	network network
	pods    []pod.Pod
	made    int // number of pods made so far, so that names are unique
}

// lifecycle measures starts, memory, restarts with endpoints, and ADD and DEL on a full node.
func (b *bench) lifecycle(ctx context.Context) (err error) {
	if err := b.startAndFirstAdd(ctx); err != nil {
		return err
	}
	node, err := upWithRoom(ctx, devnode.Options{
		Instance: b.prefix + "m", BinDir: b.binDir, Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
	})
	if err != nil {
		return err
	}
	c := &crowd{bench: b, node: node}
	defer func() {
		for i := range c.made { // including pods whose disconnection failed
			err = errors.Join(err, pod.DeleteNetns(c.pod(i).Netns))
		}
		err = errors.Join(err, node.Down(context.WithoutCancel(ctx)))
	}()
	if c.network, err = labelledOn(node, "sluice", "role", "plain"); err != nil {
		return err
	}
	// Measure memory first: a restart would free the memory that removed pods left.
	if err := c.memory(ctx); err != nil {
		return err
	}
	if err := c.restarts(ctx); err != nil {
		return err
	}
	return c.fullNode(ctx)
}

// upWithRoom starts a node with an unused range of 2,046 IPv4 addresses.
func upWithRoom(ctx context.Context, o devnode.Options) (*devnode.Node, error) {
	for i := range 16 {
		o.PodCIDRs = []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 160 + byte(i)}), 21),
			netip.MustParsePrefix(fmt.Sprintf("fd00:160:%x::/64", i)),
		}
		node, err := devnode.Up(ctx, o)
		if !errors.Is(err, unix.EEXIST) {
			return node, err
		}
	}
	return nil, errors.New("every range 10.160.0.0/21 to 10.175.0.0/21 has a route")
}

// pod returns the pod with this number.
func (c *crowd) pod(number int) pod.Pod {
	id := fmt.Sprintf("%s-%d", c.node.Instance(), number)
	return pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
}

// resize connects or disconnects pods, 8 at a time, until n are connected.
func (c *crowd) resize(ctx context.Context, n int) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, p := range c.pods[min(n, len(c.pods)):] {
		group.Go(func() error { return c.network.disconnect(groupCtx, p) })
	}
	c.pods = c.pods[:min(n, len(c.pods))]
	for len(c.pods) < n {
		p := c.pod(c.made)
		c.made++
		c.pods = append(c.pods, p)
		group.Go(func() error {
			_, err := c.network.connect(groupCtx, p.Name)
			return err
		})
	}
	return group.Wait()
}

// memory measures the memory of the processes before, with, and after many pods.
func (c *crowd) memory(ctx context.Context) error {
	b, many := c.bench, c.bench.sizes.many
	var columns []map[string]usage
	look := func() error {
		all, err := memory(c.node)
		columns = append(columns, all)
		return err
	}
	for _, n := range []int{0, many / 10, many, 0} {
		if err := c.resize(ctx, n); err != nil {
			return err
		}
		if err := look(); err != nil {
			return err
		}
	}
	const rest = 30 * time.Second
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(rest): // the processes free memory while they are idle
	}
	if err := look(); err != nil {
		return err
	}
	fmt.Fprintf(b.out,
		"Memory in MiB, resident / anonymous, as the kernel reports it in /proc/PID/status, on a fresh node:\n\n")
	fmt.Fprintf(b.out,
		"| process | idle | %d endpoints | %d endpoints | after their removal | %.0f s later |\n",
		many/10, many,
		rest.Seconds())
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|")
	sums := make([]usage, len(columns))
	for _, service := range measuredServices {
		fmt.Fprintf(b.out, "| sluice-%s |", service)
		for i, all := range columns {
			u := all[service]
			sums[i].resident += u.resident
			sums[i].anonymous += u.anonymous
			fmt.Fprintf(b.out, " %.1f / %.1f |", u.resident, u.anonymous)
		}
		fmt.Fprintln(b.out)
	}
	fmt.Fprint(b.out, "| all |")
	for _, u := range sums {
		fmt.Fprintf(b.out, " %.1f / %.1f |", u.resident, u.anonymous)
	}
	fmt.Fprint(b.out, "\n\n")
	b.wantMemory("resident, all processes, idle", 120, sums[0].resident)
	b.wantMemory("anonymous, all processes, idle", 70, sums[0].anonymous)
	b.wantMemory(fmt.Sprintf("growth of resident memory with %d endpoints", many/10), 5,
		sums[1].resident-sums[0].resident)
	b.wantMemory(fmt.Sprintf("resident, all processes, after %d pods were added and removed", many), 120,
		sums[len(sums)-1].resident)
	return nil
}

// restarts measures restarts of the datapath with endpoints, alternating with restarts on a node without endpoints.
func (c *crowd) restarts(ctx context.Context) error {
	b := c.bench
	var rows []string
	for _, n := range []int{b.sizes.many / 20, b.sizes.many / 2, b.sizes.many} {
		if err := c.resize(ctx, n); err != nil {
			return err
		}
		if n == b.sizes.many/20 {
			if err := c.kernelObjects(ctx); err != nil {
				return err
			}
		}
		var none, with restartTimes
		for range b.sizes.restarts {
			if err := b.restart(ctx, b.sluice, &none); err != nil {
				return err
			}
			if err := b.restart(ctx, c.network, &with); err != nil {
				return err
			}
		}
		for _, row := range []struct {
			endpoints int
			times     restartTimes
		}{{0, none}, {n, with}} {
			t := row.times
			rows = append(rows, fmt.Sprintf("| %d | %s | %s | %s | %s | %s |", row.endpoints,
				milliseconds(t.serving.quantile(0.5)), milliseconds(t.serving.worst()), milliseconds(t.cpu.quantile(0.5)),
				milliseconds(t.add.quantile(0.5)), milliseconds(t.add.worst())))
		}
		limit := 500 * time.Millisecond
		if n > 50 {
			limit = time.Second
		}
		b.wantTime(fmt.Sprintf("restart with %d endpoints to all served", n), limit, with.serving.quantile(0.5))
		if n <= 50 {
			b.wantTime(fmt.Sprintf("ADD issued at the stop, with %d endpoints", n), 700*time.Millisecond,
				with.add.quantile(0.5))
		}
	}
	fmt.Fprintf(b.out,
		"Restarts of the datapath, %d each, from the start of the process to serving, alternating with restarts on a node "+
			"without endpoints; processor time until then; and an ADD issued at the stop, retried as runtimes do:\n\n",
		b.sizes.restarts)
	fmt.Fprintln(b.out, "| endpoints | serving p50 | worst | processor time p50 | ADD p50 | worst |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|")
	for _, row := range rows {
		fmt.Fprintln(b.out, row)
	}
	fmt.Fprintln(b.out)
	return nil
}

// fullNode measures ADD and DEL on the full node, alternating with a node without endpoints.
func (c *crowd) fullNode(ctx context.Context) error {
	b := c.bench
	if err := c.resize(ctx, b.sizes.many); err != nil {
		return err
	}
	networks := []network{b.sluice, c.network}
	networks[0].name, networks[1].name = "no endpoints", fmt.Sprintf("%d endpoints", b.sizes.many)
	times := make([]attachmentTimes, len(networks))
	for round := range b.sizes.rounds {
		for i, n := range networks {
			prefix := fmt.Sprintf("%s-n-%d-%d", b.prefix, round, i)
			if err := b.attachAndDetach(ctx, n, prefix, max(b.sizes.pods/2, 1), 1, &times[i]); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(b.out, "ADD and DEL by number of endpoints, one at a time, interleaved in %d rounds:\n\n", b.sizes.rounds)
	b.printAttachments(networks, times, 0)
	b.printCPU(networks, times, 0)
	return nil
}

// kernelObjects reports the datapath's maps and programs.
func (c *crowd) kernelObjects(ctx context.Context) error {
	b, endpoints := c.bench, len(c.pods)
	datapath, err := b.dialTo(c.node, devnode.Datapath)
	if err != nil {
		return err
	}
	status, err := datapathv1.NewDatapathServiceClient(datapath).GetStatus(ctx, &datapathv1.GetStatusRequest{})
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
	b.wantMemory(fmt.Sprintf("kernel memory of all maps with %d endpoints", endpoints), 41.3, float64(bytes)/(1<<20))
	b.wantCount("maps", 40, len(status.GetMaps()))

	pins, err := filepath.Glob(filepath.Join(c.node.Paths().BPFDir, "sluice_*"))
	if err == nil && len(pins) == 0 {
		err = fmt.Errorf("no pinned program in %s", c.node.Paths().BPFDir)
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
		return fmt.Errorf("read program %s: %w", pin, err)
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return fmt.Errorf("read program %s: %w", pin, err)
	}
	const instruction = 8 // bytes
	walked, _ := info.VerifiedInstructions()
	fmt.Fprintf(b.out, "| %s | %d | %d |\n", info.Name, size/instruction, walked)
	return nil
}

// startAndFirstAdd restarts the datapath without endpoints, and compares the first ADD after a start with the next
// ones.
func (b *bench) startAndFirstAdd(ctx context.Context) error {
	var start, first, next samples
	for i := range b.sizes.rounds {
		if err := b.node.Stop(ctx, devnode.Datapath); err != nil {
			return err
		}
		elapsed, err := timed(func() error { return b.node.Start(ctx, devnode.Datapath) })
		if err != nil {
			return err
		}
		start = append(start, elapsed)
		var after attachmentTimes
		if err := b.attachAndDetach(ctx, b.sluice, fmt.Sprintf("%s-f-%d", b.prefix, i), 10, 1, &after); err != nil {
			return err
		}
		first, next = append(first, after.add.wall[0]), append(next, after.add.wall[1:]...)
	}
	fmt.Fprintf(b.out,
		"The datapath without endpoints, started %d times, and 10 ADDs after each start:\n\n",
		len(start))
	fmt.Fprintln(b.out, "| what | p50 | p99 | worst |")
	fmt.Fprintln(b.out, "|---|---|---|---|")
	for _, row := range []struct {
		what string
		of   samples
	}{{"process start to serving", start}, {"first ADD", first}, {"those that follow", next}} {
		fmt.Fprintf(b.out, "| %s | %s | %s | %s |\n", row.what, milliseconds(row.of.quantile(0.5)),
			milliseconds(row.of.quantile(0.99)), milliseconds(row.of.worst()))
	}
	fmt.Fprintln(b.out)
	b.wantTime("datapath: start to serving", 500*time.Millisecond, start.quantile(0.5))
	b.wantTime("first ADD after a start, p50: within the p99 of the following ADDs", next.quantile(0.99),
		first.quantile(0.5))
	return nil
}

// restartTimes are the durations of several restarts.
type restartTimes struct {
	serving samples // from the start of the process
	cpu     samples // the process's processor time until it serves
	add     samples // from just before the stop
}

// restart stops and starts the datapath of the network's node. At the moment of the stop it begins an ADD, which it
// retries until it succeeds.
func (b *bench) restart(ctx context.Context, n network, times *restartTimes) error {
	id := fmt.Sprintf("%s-r", n.node.Instance())
	if err := pod.NewNetns(pod.NetnsPath(id)); err != nil {
		return err
	}
	begin := time.Now()
	added := make(chan error, 1)
	var addTime time.Duration
	if err := n.node.Stop(ctx, devnode.Datapath); err != nil {
		return errors.Join(err, pod.DeleteNetns(pod.NetnsPath(id)))
	}
	go func() {
		err := ctx.Err()
		for ctx.Err() == nil {
			if _, _, err = n.call(ctx, "ADD", id, pod.NetnsPath(id)); err == nil {
				break
			}
		}
		addTime = time.Since(begin)
		added <- err
	}()
	elapsed, err := timed(func() error { return n.node.Start(ctx, devnode.Datapath) })
	var used time.Duration
	if err == nil {
		used, err = serviceCPU(n.node, devnode.Datapath)
	}
	err = errors.Join(err, <-added)
	err = errors.Join(err, n.disconnect(ctx, pod.Pod{Name: id, Netns: pod.NetnsPath(id)}))
	if err != nil {
		return err
	}
	times.serving, times.cpu = append(times.serving, elapsed), append(times.cpu, used)
	times.add = append(times.add, addTime)
	return nil
}
