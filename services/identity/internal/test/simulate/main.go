// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command simulate runs a cluster of many nodes on one real etcd and reports its cost. Most nodes consist of a watch on
// a separate connection, and of keys that publishers write for them. Two nodes are real sluice-identity processes, whose
// state is compared with the written keys at the end.
//
//	simulate -bin DIR [-nodes 500] [-addresses 50000] [-identities 2000] [-seconds 20] [-profile DIR]
//	simulate -load ENDPOINT [-nodes 500] [-addresses 50000] [-identities 2000]
//
// With -load it only writes the cluster into an etcd that runs already, such as a development node's.
//
// It prints a table of targets and measurements. It exits with 1 if a change was not delivered to every watch, or if a
// full node's state differs from the cluster's. Missed targets are only reported.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

// options are the command line.
type options struct {
	bin        string
	nodes      int
	addresses  int
	identities int
	seconds    int
	profile    string
	load       string
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	var o options
	set := flag.NewFlagSet("simulate", flag.ContinueOnError)
	set.StringVar(&o.bin, "bin", "bin", "directory of sluice-identity and sluice-devetcd")
	set.IntVar(&o.nodes, "nodes", 500, "nodes that are a watch and keys, at most 4,000")
	set.IntVar(&o.addresses, "addresses", 50_000, "addresses of all of them together, at most 200 a node")
	set.IntVar(&o.identities, "identities", 2_000, "identities of the cluster, at most 60,000")
	set.IntVar(&o.seconds, "seconds", 20, "how long changes are written at each rate")
	set.StringVar(&o.profile, "profile", "", "directory for CPU and heap profiles of a full node")
	set.StringVar(&o.load, "load", "", "write the cluster into the etcd at this endpoint, and do nothing else")
	if set.Parse(args) != nil {
		return 2
	}
	if set.NArg() > 0 || o.nodes < 20 || o.nodes > 4000 || o.identities < 1 || o.identities > 60_000 ||
		o.addresses < o.nodes || o.addresses/o.nodes > 200 || o.seconds < 1 {
		set.Usage()
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if o.load != "" {
		if err := load(ctx, o); err != nil {
			fmt.Fprintln(os.Stderr, "simulate:", err)
			return 1
		}
		return 0
	}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o755); err != nil {
			fmt.Fprintln(os.Stderr, "simulate:", err)
			return 1
		}
	}
	dir, err := os.MkdirTemp("", "simulate-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "simulate:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	fmt.Printf("%s %s/%s, %d CPUs: %d nodes, %d addresses, %d identities, %d s at each rate\n\n",
		runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), o.nodes, o.addresses, o.identities, o.seconds)
	s := &simulation{options: o, dir: dir}
	err = s.run(ctx)
	s.end()
	s.report.write(os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "simulate:", err)
		return 1
	}
	return 0
}

// load writes the cluster into an etcd that the simulation did not start.
func load(ctx context.Context, o options) error {
	c, err := newCluster(o.load, o.nodes, o.addresses, o.identities)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.name(ctx); err != nil {
		return err
	}
	return c.load(ctx)
}

// patience is the timeout of each step, long enough for a slow machine.
const patience = 2 * time.Minute

type simulation struct {
	options
	dir     string
	etcd    *etcd
	cluster *cluster
	watches *watches
	full    []*node
	report  report
}

// end stops all processes.
func (s *simulation) end() {
	for _, n := range s.full {
		n.stop()
	}
	s.watches.close()
	s.cluster.close()
	s.etcd.stop()
}

// changeRates are the tested rates: changes of all nodes in a second, and changes in one transaction.
var changeRates = []struct{ rate, together int }{{20, 1}, {100, 1}, {1000, 10}}

func (s *simulation) run(ctx context.Context) (err error) {
	if s.etcd, err = startEtcd(ctx, s.bin, s.dir); err != nil {
		return err
	}
	if s.cluster, err = newCluster(s.etcd.endpoint, s.nodes, s.addresses, s.identities); err != nil {
		return err
	}
	if err := s.cluster.name(ctx); err != nil {
		return err
	}
	first, err := s.start(ctx, "full-a", 0)
	if err != nil {
		return err
	}
	empty, err := first.memory(ctx)
	if err != nil {
		return err
	}
	if err := s.load(ctx, first, empty); err != nil {
		return err
	}
	if err := s.join(ctx, "full-b", 1); err != nil {
		return err
	}
	s.cluster.begin()
	if s.watches, err = newWatches(ctx, s.etcd.endpoint, s.nodes, s.cluster.revision()+1); err != nil {
		return err
	}
	for _, r := range changeRates {
		if err := s.change(ctx, r.rate, r.together); err != nil {
			return fmt.Errorf("%d changes/s: %w", r.rate, err)
		}
	}
	for _, step := range []func(context.Context) error{s.forget, s.list, s.compact} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	for _, n := range s.full {
		m, err := n.memory(ctx)
		if err != nil {
			return err
		}
		s.report.note("memory of sluice-identity on "+n.name+" in the end: heap; resident; at most",
			"%.1f MiB; %.1f MiB; %.1f MiB", m.heap, m.resident, m.peak)
	}
	_, etcd := s.etcd.resident()
	_, own := resident(os.Getpid())
	s.report.note("resident memory of etcd; of the simulation, at most", "%.0f MiB; %.0f MiB", etcd, own)
	return nil
}

// start starts a full node with an endpoint of each kind of its own.
func (s *simulation) start(ctx context.Context, name string, index int) (*node, error) {
	n, err := startNode(ctx, s.bin, s.dir, name, index, s.etcd.endpoint, s.cluster)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	s.full = append(s.full, n)
	return n, n.publish(ctx, 20)
}

// load writes the cluster while a full node follows.
func (s *simulation) load(ctx context.Context, first *node, empty memory) error {
	etcd, identity := s.etcd.cpu(), first.cpu()
	first.profile(ctx, s.profile, "load", 10)
	began := time.Now()
	if err := s.cluster.load(ctx); err != nil {
		return err
	}
	written := time.Since(began)
	if err := s.equal(ctx, "after the load"); err != nil {
		return err
	}
	s.report.note("load: written; on a full node; CPU of etcd; of sluice-identity", "%.1f s; %.1f s; %.1f s; %.1f s",
		written.Seconds(), time.Since(began).Seconds(), s.etcd.cpu()-etcd, first.cpu()-identity)
	first.profiled()
	if err := first.heap(ctx, s.profile); err != nil {
		return err
	}
	full, err := first.kept(ctx)
	if err != nil {
		return err
	}
	grown := full.heap - empty.heap
	s.report.add(fmt.Sprintf("heap that sluice-identity keeps for it, in addition to %.1f MiB", empty.heap),
		"at most 20 MiB",
		fmt.Sprintf("%.1f MiB", grown), grown <= 20)
	s.report.note("resident memory of sluice-identity before; after it; at most", "%.1f MiB; %.1f MiB; %.1f MiB",
		empty.resident, full.resident, full.peak)
	return nil
}

// join starts another full node and measures the time until it has the complete state.
func (s *simulation) join(ctx context.Context, name string, index int) error {
	etcd := s.etcd.cpu()
	began := time.Now()
	n, err := s.start(ctx, name, index)
	if err != nil {
		return err
	}
	if err := n.view.complete(ctx); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	took := time.Since(began)
	s.report.want("a new node is complete, from the start of its process on", 2*time.Second, took)
	s.report.note("CPU of etcd; of sluice-identity for it", "%.2f s; %.2f s", s.etcd.cpu()-etcd, n.cpu())
	return s.equal(ctx, "after "+name+" joined")
}

// change writes changes at a rate and waits until every watch has them.
func (s *simulation) change(ctx context.Context, rate, together int) error {
	etcd, identity := s.etcd.cpu(), s.identityCPU()
	for _, n := range s.full {
		n.view.reset()
	}
	if rate == 1000 {
		s.full[0].profile(ctx, s.profile, "changes", s.seconds)
	}
	s.watches.reset()
	began := time.Now()
	changes, err := s.cluster.change(ctx, rate, together, time.Duration(s.seconds)*time.Second)
	if err != nil {
		return err
	}
	writing := time.Since(began)
	if err := s.delivered(ctx); err != nil {
		return err
	}
	done := time.Since(began)
	etcd = s.etcd.cpu() - etcd
	identity = (s.identityCPU() - identity) / float64(len(s.full))
	at := fmt.Sprintf("at %d changes/s, %d a transaction: ", rate, together)
	if err := s.equal(ctx, at); err != nil {
		return err
	}

	s.report.note(at+"done; everywhere after", "%.0f/s; %.1f s", float64(changes)/writing.Seconds(), done.Seconds())
	perDelivery := 1e6 * etcd / float64(changes*int64(s.nodes))
	s.report.add(at+"CPU of etcd per delivery", "under 100 µs",
		fmt.Sprintf("%.1f µs (%.0f %% of a core)", perDelivery, 100*etcd/done.Seconds()), perDelivery < 100)
	lags := s.watches.lags()
	p50, p99 := percentile(lags, 50), percentile(lags, 99)
	wanted, met := "", true
	if rate == 20 {
		wanted, met = "p99 at most 300 ms", p99 <= 300*time.Millisecond
	}
	s.report.add(at+"lag of the watches, p50; p99", wanted, fmt.Sprintf("%d; %d ms", p50.Milliseconds(),
		p99.Milliseconds()), met)
	lags = nil
	for _, n := range s.full {
		lags = append(lags, n.view.lags()...)
	}
	p50, p99 = percentile(lags, 50), percentile(lags, 99)
	s.report.note(at+"lag at a client of WatchCluster, p50; p99", "%d; %d ms", p50.Milliseconds(), p99.Milliseconds())
	s.report.note(at+"CPU of sluice-identity", "%.1f %% of a core, %.0f µs a change",
		100*identity/done.Seconds(), 1e6*identity/float64(changes))
	s.full[0].profiled()
	return nil
}

// identityCPU returns the CPU time of the full nodes' processes so far, in seconds.
func (s *simulation) identityCPU() (sum float64) {
	for _, n := range s.full {
		sum += n.cpu()
	}
	return sum
}

// forget forgets ten nodes, one after the other.
func (s *simulation) forget(ctx context.Context) error {
	s.watches.reset()
	began := time.Now()
	for range 10 {
		if err := s.cluster.forget(ctx, s.full[0]); err != nil {
			return err
		}
	}
	if err := s.delivered(ctx); err != nil {
		return fmt.Errorf("10 nodes forgotten: %w", err)
	}
	if err := s.equal(ctx, "after 10 nodes were forgotten"); err != nil {
		return err
	}
	s.report.note("10 nodes forgotten, one after the other: out of effect everywhere after", "%.1f s",
		time.Since(began).Seconds())
	return nil
}

// list makes each node list all keys, spread over 30 s as after an outage.
func (s *simulation) list(ctx context.Context) error {
	const spread = 30 * time.Second
	etcd := s.etcd.cpu()
	began := time.Now()
	bytes, slowest, err := s.watches.list(ctx, spread)
	if err != nil {
		return fmt.Errorf("%d listings: %w", s.nodes, err)
	}
	s.report.note(fmt.Sprintf("%d listings, begun over %.0f s: done after; the slowest; CPU of etcd and bytes of each",
		s.nodes, spread.Seconds()), "%.1f s; %.1f s; %.0f ms and %.1f MB", time.Since(began).Seconds(), slowest.Seconds(),
		1e3*(s.etcd.cpu()-etcd)/float64(s.nodes), float64(bytes)/1e6)
	return nil
}

// compact kills a full node, changes the cluster and starts the node again. The first time, etcd still has the missed
// revisions. The second time, etcd has compacted them: then the node waits for a random time before it lists all keys,
// as all nodes would.
func (s *simulation) compact(ctx context.Context) error {
	n := s.full[0]
	again := func(forget func(context.Context) error) (time.Duration, error) {
		n.kill()
		s.watches.reset()
		if _, err := s.cluster.change(ctx, 1000, 10, 2*time.Second); err != nil {
			return 0, err
		}
		if err := s.delivered(ctx); err != nil {
			return 0, err
		}
		if err := forget(ctx); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := n.again(ctx); err != nil {
			return 0, err
		}
		err := s.equal(ctx, "after a full node was killed")
		return time.Since(began), err
	}
	took, err := again(func(context.Context) error { return nil })
	if err != nil {
		return err
	}
	s.report.want("a node that was killed, 2,000 changes behind: complete again", 2*time.Second, took)
	if took, err = again(s.cluster.compact); err != nil {
		return err
	}
	spread := min(time.Duration(s.nodes)*time.Second/20, time.Minute)
	what := fmt.Sprintf("behind a compaction, with a random wait of at most %.0f s", spread.Seconds())
	s.report.want(what, spread+2*time.Second, took)
	// The others continue.
	if _, err := s.cluster.change(ctx, 100, 1, time.Second); err != nil {
		return err
	}
	if err := s.delivered(ctx); err != nil {
		return fmt.Errorf("after the compaction: %w", err)
	}
	return s.equal(ctx, "after the compaction")
}

// delivered waits until every watch has every change.
func (s *simulation) delivered(ctx context.Context) error {
	return s.report.always("every change at every watch", s.watches.wait(ctx, s.cluster.changes()))
}

// equal compares the state of the full nodes with the keys that were written.
func (s *simulation) equal(ctx context.Context, when string) error {
	var errs []error
	for _, n := range s.full {
		if err := n.equal(ctx, s.cluster); err != nil {
			errs = append(errs, fmt.Errorf("%s, %s: %w", n.name, when, err))
		}
	}
	return s.report.always("the full nodes have what was written", errors.Join(errs...))
}
