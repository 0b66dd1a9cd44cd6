// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxymap

import (
	"errors"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func open(t *testing.T, dir string) (*Maps, *pin.Maps) {
	t.Helper()
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	pins, err := pin.Open(pin.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)}, spec)
	if err != nil {
		t.Fatal(err)
	}
	m := Open(pins)
	t.Cleanup(func() {
		m.Close()
		if err := pins.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, pins
}

// TestProxiesOutliveTheProcess: the next process finds the device and the state of each proxy, and programs read both
// in one word.
func TestProxiesOutliveTheProcess(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	m, _ := open(t, dir)
	want := map[policytable.Proxy]Proxy{
		policytable.ProxyDNS: {Device: 7, Attached: true}, policytable.ProxyHTTP: {Device: 8}, policytable.ProxyTLS: {},
	}
	for kind, p := range want {
		if err := m.Set(kind, p); err != nil {
			t.Fatal(err)
		}
	}
	next, pins := open(t, dir)
	for kind, p := range want {
		if got, err := next.Get(kind); err != nil || got != p {
			t.Errorf("%v: %+v, %v, want %+v", kind, got, err, p)
		}
	}
	var raw bpf.MapsSlProxy
	err := pins.Map(bpf.MapsMapSlProxy).Lookup(uint32(policytable.ProxyDNS), &raw)
	if err != nil || raw.Device != 7 || raw.State != attached {
		t.Errorf("%+v, %v", raw, err)
	}
}

func TestInvalidProxiesAreRefused(t *testing.T) {
	m, _ := open(t, kerneltest.NewBPFFS(t))
	for _, err := range []error{
		m.Set(policytable.NoProxy, Proxy{Device: 1}), m.Set(DNSNamespace+1, Proxy{Device: 1}),
		m.Set(policytable.ProxyDNS, Proxy{Attached: true}),
	} {
		if !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("%v, want %v", err, pin.ErrInvalid)
		}
	}
	if p, err := m.Get(policytable.ProxyDNS); err != nil || p != (Proxy{}) {
		t.Errorf("%+v, %v", p, err)
	}
	m.Close()
	if err := m.Set(policytable.ProxyDNS, Proxy{}); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestHeartbeatsAreWrittenThroughTheirOwnMap: a proxy maps the memory of its heartbeat by the descriptor that it gets.
// That map has no other content, and the other proxy cannot write it.
func TestHeartbeatsAreWrittenThroughTheirOwnMap(t *testing.T) {
	m, _ := open(t, kerneltest.NewBPFFS(t))
	kinds := []policytable.Proxy{policytable.ProxyDNS, policytable.ProxyHTTP}
	for i, kind := range kinds {
		beats, err := m.Heartbeats(kind)
		if err != nil {
			t.Fatal(err)
		}
		defer beats.Close()
		memory, err := unix.Mmap(beats.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		want := time.Duration(i+1) * time.Minute
		for at := 0; at < len(memory); at += 8 {
			atomic.StoreUint64(pin.Word(memory, at), uint64(9*time.Minute)) // a broken proxy
		}
		atomic.StoreUint64(pin.Word(memory, int(HeartbeatOffset(kind))), uint64(want))
		if at, err := m.LastHeartbeat(kind); err != nil || at != want {
			t.Errorf("%s: %v, %v", kind, at, err)
		}
		if err := unix.Munmap(memory); err != nil {
			t.Error(err)
		}
	}
	if at, err := m.LastHeartbeat(policytable.ProxyDNS); err != nil || at != time.Minute {
		t.Errorf("after the HTTP proxy has written: %v, %v", at, err)
	}
}

// TestQueueLengthIsThatOfThePrograms: macros are not in the type information of the objects.
func TestQueueLengthIsThatOfThePrograms(t *testing.T) {
	text, err := os.ReadFile("../../../../../bpf/include/sluice/abi.h")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{
		"SL_PROXY_QUEUE": QueueLength, "SL_PROXY_ATTACHED": attached, "SL_PROXY_DNS": int(policytable.ProxyDNS),
		"SL_PROXY_DNS_TCP": int(DNSNamespace),
	} {
		m := regexp.MustCompile(`#define ` + name + ` (\d+)\n`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("abi.h does not define %s", name)
		}
		if got, err := strconv.Atoi(string(m[1])); err != nil || got != want {
			t.Errorf("%s is %d, %v, in Go %d", name, got, err, want)
		}
	}
}
