// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package proxymap tells the programs which proxies run, and to which devices their packets go. The heartbeats of the
// proxies are in a separate map, the only one that a proxy can write.
package proxymap

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// QueueLength is the length of a TAP device's queue in packets by which the programs divide the queue among the
// endpoints: SL_PROXY_QUEUE of abi.h.
const QueueLength = 4096

// DNSNamespace is the index of the proxy namespace of the DNS proxy, to which TCP segments go: SL_PROXY_DNS_TCP.
const DNSNamespace policytable.Proxy = 5

// NamespaceOf returns the index of the proxy namespace of a kind of proxy. A proxy without a TAP device has no other
// entry.
func NamespaceOf(kind policytable.Proxy) policytable.Proxy {
	if kind == policytable.ProxyDNS {
		return DNSNamespace
	}
	return kind
}

// attached is SL_PROXY_ATTACHED.
const attached = 1

// Proxy tells the programs where to send the packets for a proxy.
type Proxy struct {
	// Device is the index of the TAP device, or of the node's end of the proxy namespace; 0: no proxy of the kind
	// was ever attached.
	Device uint32
	// Attached: the proxy runs, so that packets are sent to the device. For a proxy namespace: connections may
	// begin.
	Attached bool
}

// Maps are the maps of proxies. Their methods may be called concurrently.
type Maps struct {
	gate  pin.Gate
	state []byte // value of sl_proxy
	beats []byte // value of sl_proxy_beat
	http  []byte // value of sl_http_beat
	pins  *pin.Maps
}

// Open opens the maps of proxies.
func Open(pm *pin.Maps) *Maps {
	return &Maps{
		gate:  pin.Gate{ValidateOnly: pm.ValidateOnly},
		state: pm.Memory(bpf.MapsMapSlProxy), beats: pm.Memory(bpf.MapsMapSlProxyBeat),
		http: pm.Memory(bpf.MapsMapSlHttpBeat), pins: pm,
	}
}

// word returns the packed entry of a kind of proxy, its device and state, which programs read with one load.
func (m *Maps) word(kind policytable.Proxy) (*uint64, error) {
	if kind == policytable.NoProxy || kind > DNSNamespace {
		return nil, fmt.Errorf("%w: proxy %d", pin.ErrInvalid, kind)
	}
	return pin.Word(m.state, int(kind)*int(unsafe.Sizeof(bpf.MapsSlProxy{}))), nil
}

// Set changes what the programs know about a kind of proxy.
func (m *Maps) Set(kind policytable.Proxy, p Proxy) error {
	if p.Attached && p.Device == 0 {
		return fmt.Errorf("%w: proxy %s is attached to no device", pin.ErrInvalid, kind)
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	word, err := m.word(kind)
	if err != nil {
		return err
	}
	now := uint64(p.Device)
	if p.Attached {
		now |= attached << 32
	}
	atomic.StoreUint64(word, now)
	return nil
}

// Get returns what the programs know about a kind of proxy.
func (m *Maps) Get(kind policytable.Proxy) (p Proxy, err error) {
	err = m.gate.Read(func() error {
		word, err := m.word(kind)
		if err != nil {
			return err
		}
		now := atomic.LoadUint64(word)
		p = Proxy{Device: uint32(now), Attached: now>>32 == attached}
		return nil
	})
	return p, err
}

// HeartbeatOffset returns the offset of a proxy's heartbeat in the mapped memory of Heartbeats.
func HeartbeatOffset(kind policytable.Proxy) uint32 {
	if kind == policytable.ProxyHTTP {
		return 0
	}
	return uint32(kind) * 8
}

// Heartbeats returns a handle of the map with the heartbeat of a kind of proxy, which the caller closes. The proxy maps
// its memory: in the word at HeartbeatOffset it writes CLOCK_MONOTONIC in ns.
func (m *Maps) Heartbeats(kind policytable.Proxy) (*ebpf.Map, error) {
	if kind == policytable.ProxyHTTP {
		return m.pins.Borrow(bpf.MapsMapSlHttpBeat)
	}
	return m.pins.Borrow(bpf.MapsMapSlProxyBeat)
}

// LastHeartbeat returns the last heartbeat of a kind of proxy, CLOCK_MONOTONIC; 0: none yet.
func (m *Maps) LastHeartbeat(kind policytable.Proxy) (at time.Duration, err error) {
	err = m.gate.Read(func() error {
		if _, err := m.word(kind); err != nil {
			return err
		}
		memory := m.beats
		if kind == policytable.ProxyHTTP {
			memory = m.http
		}
		at = time.Duration(atomic.LoadUint64(pin.Word(memory, int(HeartbeatOffset(kind)))))
		return nil
	})
	return at, err
}

// Close makes every later call fail.
func (m *Maps) Close() { m.gate.Close() }
