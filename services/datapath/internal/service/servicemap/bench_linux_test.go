// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// manyServices returns n frontends, each with its own backends.
func manyServices(n, backends int) *frontendtx.Transaction {
	tx := &frontendtx.Transaction{}
	for i := range n {
		l := &frontend.List{}
		for b := range backends {
			at := i*16 + b
			a := netip.AddrFrom4([4]byte{10, byte(at >> 16), byte(at >> 8), byte(at)})
			l.Backends = append(l.Backends, frontend.Backend{AddrPort: netip.AddrPortFrom(a, 8080)})
		}
		tx.Upsert(service(i, false, l))
	}
	return tx
}

func BenchmarkKernelWrite(b *testing.B) {
	for _, backends := range []int{2, 10} {
		b.Run(fmt.Sprintf("10000 frontends of %d backends", backends), func(b *testing.B) {
			tx := manyServices(10000, backends)
			best := time.Hour
			for b.Loop() {
				b.StopTimer()
				i := start(b, kerneltest.NewBPFFS(b), sizes{})
				b.StartTimer()
				began := time.Now()
				i.apply(b, tx)
				best = min(best, time.Since(began))
				b.StopTimer()
				i.close(b)
				b.StartTimer()
			}
			b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
		})
	}
}

func BenchmarkKernelAdopt(b *testing.B) {
	dir := kerneltest.NewBPFFS(b)
	tx := manyServices(10000, 10)
	i := start(b, dir, sizes{})
	i.apply(b, tx)
	i.close(b)
	for _, confirm := range []bool{false, true} {
		b.Run(fmt.Sprintf("confirm %t", confirm), func(b *testing.B) {
			best := time.Hour
			for b.Loop() {
				began := time.Now()
				i := open(b, dir, sizes{})
				if confirm {
					began = time.Now()
					if res := i.apply(b, tx); res.Changed != 0 {
						b.Fatal("something changed")
					}
				}
				best = min(best, time.Since(began))
				i.close(b)
			}
			b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
		})
	}
}

// BenchmarkKernelChange adds a backend to each of 10,000 frontends, one transaction per frontend, and removes it again.
func BenchmarkKernelChange(b *testing.B) {
	const window = 500
	i := start(b, kerneltest.NewBPFFS(b), sizes{})
	lists := [2]*frontendtx.Transaction{manyServices(10000, 10), manyServices(10000, 11)}
	i.apply(b, lists[0])
	n, best, began := 0, time.Hour, time.Now()
	for b.Loop() {
		tx := &frontendtx.Transaction{}
		tx.Upsert(lists[(n/10000+1)%2].Changes()[n%10000].Frontend)
		i.apply(b, tx)
		if n++; n%window > 0 {
			continue
		}
		best = min(best, time.Since(began)/window)
		if n%10000 == 0 {
			b.StopTimer()
			i.collectAll(b)
			b.StartTimer()
		}
		began = time.Now()
	}
	b.ReportMetric(float64(best.Nanoseconds())/1000, "best-us")
}

func BenchmarkKernelAudit(b *testing.B) {
	i := start(b, kerneltest.NewBPFFS(b), sizes{})
	i.apply(b, manyServices(10000, 10))
	best := time.Hour
	for b.Loop() {
		began := time.Now()
		i.sound(b)
		best = min(best, time.Since(began))
	}
	b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
}

// BenchmarkKernelTable exchanges the table of a frontend after a change of one backend.
func BenchmarkKernelTable(b *testing.B) {
	for _, n := range []int{100, 200} {
		b.Run(fmt.Sprintf("%d backends", n), func(b *testing.B) {
			i := start(b, kerneltest.NewBPFFS(b), sizes{})
			var txs [2]*frontendtx.Transaction
			for more := range txs {
				txs[more] = &frontendtx.Transaction{}
				txs[more].Upsert(service(1, false, tableList(false, numbersTo(n+more)...)))
			}
			i.apply(b, txs[0])
			best := time.Hour
			for round := 1; b.Loop(); round++ {
				began := time.Now()
				i.apply(b, txs[round%2])
				best = min(best, time.Since(began))
				b.StopTimer()
				i.collectAll(b)
				b.StartTimer()
			}
			b.ReportMetric(float64(best.Nanoseconds())/1000, "best-us")
		})
	}
}
