// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// sizes are the numbers of endpoints on a node in the benchmarks.
var sizes = []int{50, 500, 1000}

// BenchmarkRestart measures the start of a node with endpoints: opening maps and programs, then comparing everything of
// the endpoints.
func BenchmarkRestart(b *testing.B) {
	w := newWorld(b)
	w.pods4 = netip.MustParsePrefix("10.96.0.0/16")
	w.start(false)
	for _, n := range sizes {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			w.fill(n)
			var opened, restored, compared, cpu time.Duration
			for b.Loop() {
				b.StopTimer()
				w.stop()
				b.StartTimer()
				began, used := time.Now(), processorTime(b)
				r := w.open()
				opened += time.Since(began)
				if err := r.node.restore(b.Context()); err != nil {
					b.Fatal(err)
				}
				restored += time.Since(began)
				if err := r.node.Endpoints.Compare(b.Context()); err != nil {
					b.Fatal(err)
				}
				compared += time.Since(began)
				cpu += processorTime(b) - used
				b.StopTimer()
				w.run(r, false)
				b.StartTimer()
			}
			b.ReportMetric(milliseconds(opened)/float64(b.N), "ms-open")
			b.ReportMetric(milliseconds(restored)/float64(b.N), "ms-restored")
			b.ReportMetric(milliseconds(compared)/float64(b.N), "ms-compared")
			b.ReportMetric(milliseconds(cpu)/float64(b.N), "ms-cpu")
		})
	}
}

// fill creates endpoints until the node has n.
func (w *world) fill(n int) {
	for have := len(w.node.Endpoints.Report.List()); have < n; have++ {
		w.pod(fmt.Sprintf("resident-%d", have))
	}
}

// batch is the number of containers that BenchmarkLife creates before it deletes them.
const batch = 20

// BenchmarkLife measures creation and deletion on a node that already has endpoints, including the processor time for
// handling the kernel's events. Other services are fakes that answer at once.
func BenchmarkLife(b *testing.B) {
	w := newWorld(b)
	w.pods4 = netip.MustParsePrefix("10.96.0.0/16")
	w.start(true)
	for _, n := range append([]int{0}, sizes...) {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			w.fill(n)
			var create, remove cost
			for b.Loop() {
				namespaces, specs := w.batch(b)
				create.measure(b, specs, func(s endpoint.Spec) error {
					_, err := w.node.Endpoints.Lifecycle.Create(b.Context(), s, false)
					return err
				})
				remove.measure(b, specs, func(s endpoint.Spec) error {
					_, err := w.delete(s.Owner)
					return err
				})
				for _, ns := range namespaces {
					ns.Close() // destroys the device, too
				}
				settle(b)
			}
			create.report(b, "create")
			remove.report(b, "delete")
		})
	}
}

func (w *world) batch(tb testing.TB) (namespaces []*netns.Namespace, specs []endpoint.Spec) {
	for range batch {
		ns := netnstest.New(tb)
		namespaces = append(namespaces, ns)
		specs = append(specs, w.spec(fmt.Sprintf("pod-%d", w.next), ns))
	}
	w.next -= batch
	settle(tb)
	return namespaces, specs
}

// cost is the time that operations took.
type cost struct {
	took []time.Duration
	cpu  time.Duration
}

func (c *cost) measure(tb testing.TB, specs []endpoint.Spec, do func(endpoint.Spec) error) {
	used := processorTime(tb)
	for _, s := range specs {
		began := time.Now()
		if err := do(s); err != nil {
			tb.Fatal(err)
		}
		c.took = append(c.took, time.Since(began))
	}
	settle(tb)
	c.cpu += processorTime(tb) - used
}

func (c *cost) report(b *testing.B, what string) {
	slices.Sort(c.took)
	b.ReportMetric(milliseconds(c.took[len(c.took)/20]), "ms-"+what+"-p5")
	b.ReportMetric(milliseconds(c.took[len(c.took)/2]), "ms-"+what+"-p50")
	b.ReportMetric(milliseconds(c.cpu)/float64(len(c.took)), "ms-cpu-"+what)
}

// settle waits until the process is idle.
func settle(tb testing.TB) {
	const look = 20 * time.Millisecond
	tick := time.NewTicker(look)
	defer tick.Stop()
	for quiet := 0; quiet < 3; {
		before := processorTime(tb)
		<-tick.C
		if processorTime(tb)-before < look/20 {
			quiet++
		} else {
			quiet = 0
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// processorTime returns the processor time of the process, including kernel time.
func processorTime(tb testing.TB) time.Duration {
	tb.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
