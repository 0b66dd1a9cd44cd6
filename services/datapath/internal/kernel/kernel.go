// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kernel owns the eBPF maps and programs of one Sluice instance.
//
// It loads the programs of the repository's bpf/ folder against maps that are pinned in the instance's bpffs
// directory, writes endpoints and addresses into those maps, and reads counters and events. Its state in the
// kernel outlives the process: the tc filters hold the programs, the pins hold the maps, and the next process
// adopts both.
//
// It does not touch devices, routes, filters or namespaces. It makes no decisions: the caller decides which
// endpoints exist and which policy tables evaluate them.
//
// The way in which a map is written is part of its contract. A value of a hash map is written once, and
// deleted. Data that changes is in one aligned 64-bit word of an array. A value of a longest-prefix-match map
// has at most eight bytes and may be replaced. A reader therefore never misses a published endpoint and never
// reads the entry of another one.
package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// Options select where the maps are pinned, and set the constants of the programs.
type Options struct {
	// Dir is the bpffs directory of this instance, for example
	// /run/sluice/bpf. It is created with mode 0700 if it does not exist; a
	// bpffs must be mounted at it or above it.
	Dir string

	// PodCIDRs are the pod CIDRs of the local node. A packet to an address inside them that no endpoint has
	// is dropped with the reason no-route and never leaves the node. If empty, the pod CIDRs in the pinned
	// ipcache stay; IPCache can change them.
	PodCIDRs []netip.Prefix

	// TunnelPorts are UDP ports that pods may not reach on any node address, because a packet to such a
	// port could forge the identity of another pod. At most MaxTunnelPorts, 1 to 65535. Empty means the
	// VXLAN port 4789.
	TunnelPorts []uint16

	// EventsPerSecond limits the events of one endpoint and reason. All endpoints on a CPU together may
	// have 16 times as many for a reason, of which each is guaranteed a part. Suppressed events are counted in the
	// Lost field of the next event. Zero means 64.
	EventsPerSecond uint32

	// Routing selects how packets travel between pods of two nodes, and so which programs are loaded.
	Routing Routing

	// Shortcut, with RoutingOverlay: programs encapsulate and decapsulate tunnel packets themselves, without the tunnel
	// device, on the paths that the maps of nodes allow. TunnelPort is then the UDP port of the tunnel.
	Shortcut   bool
	TunnelPort uint16

	// Services creates the maps of services in their full size. Without it they have one element each.
	Services bool

	// Sockets selects the sockets that the socket load balancer serves. If nil, no program is attached to a
	// cgroup. It requires Services.
	Sockets *sockets.Options

	// CopyDSCP copies the DSCP of packets to the outer headers of the tunnel.
	CopyDSCP bool

	// NoConnectionEvents suppresses events about allowed and ended connections. Drops are still reported,
	// and so are packets that pass in audit mode although the policy denies them.
	NoConnectionEvents bool

	// ReservedEndpoints allows endpoints with reserved identities. Tests that compare tables with the
	// policy engine need them as subjects.
	ReservedEndpoints bool

	// ValidateOnly loads and verifies everything against private maps and writes nothing below Dir. The
	// returned Kernel rejects changes with ErrValidateOnly; its Endpoints and IPCache list the contents of
	// the pinned maps, if there are any.
	ValidateOnly bool

	// Log receives what Open has adopted, created and repaired. Nil discards it.
	Log *slog.Logger

	build build // tests replace it
}

// build contains the compiled maps and programs, and the feature probes.
type build struct {
	maps      func() (*ebpf.CollectionSpec, error)
	programs  []program.Spec
	conntrack func() (bool, error) // whether programs can look up connections in nf_conntrack
	cast      func() (bool, error) // whether programs can read the kernel's sk_buff directly
}

// Routing selects how packets travel between pods of two nodes.
type Routing uint8

const (
	// RoutingNone: there is no route to pods of other nodes.
	RoutingNone Routing = iota
	// RoutingOverlay: in a tunnel between the nodes.
	RoutingOverlay
	// RoutingNative: native routing, without encapsulation.
	RoutingNative
)

func (r Routing) devices() []program.Devices {
	switch r {
	case RoutingOverlay:
		return []program.Devices{program.Endpoints, program.Tunnel}
	case RoutingNative:
		return []program.Devices{program.Endpoints, program.Uplinks}
	}
	return []program.Devices{program.Endpoints}
}

// DefaultTunnelPort is the VXLAN port, the default of Options.TunnelPorts.
const DefaultTunnelPort = 4789

// MaxTunnelPorts is the maximum length of Options.TunnelPorts.
const MaxTunnelPorts = 4

// Kernel has a handle for each package that owns maps or programs of one instance. All methods may be called
// concurrently.
type Kernel struct {
	opened Options // with defaults

	Pins      *pin.Maps
	Programs  *program.Programs
	Endpoints *endpointmap.Maps
	Addresses *ipmap.Maps // for reading; only IPCache writes them
	IPCache   *ipcache.Cache
	Nodes     *nodemap.Maps
	Tables    *policymap.Maps
	Services  *servicemap.Maps
	// Namespaces records which endpoint the sockets of a network namespace belong to.
	Namespaces *sockets.Namespaces
	// Sockets attaches the socket load balancer; nil without one.
	Sockets *sockets.Sockets
	// SocketList lists the sockets that were translated to a backend; nil without socket load balancer.
	SocketList *socketlist.List

	Connections *conntrack.Connections
	// Translations reads the translations of packets to services.
	Translations *translation.Maps
	Events       *event.Events
	// Bounds are the bounds that endpoints share.
	Bounds *bound.Bounds

	// Proxies tells the programs which proxies run.
	Proxies *proxymap.Maps

	// Replicas runs copies of the programs on packets of its own, to explain what the programs would do.
	Replicas *dryrun.Programs

	direct direct // frontends whose direct connections have still to be removed

	reloading sync.Mutex // guards conntrack
	conntrack bool       // the programs look up connections in nf_conntrack
	cast      bool       // the programs read the kernel's sk_buff directly

	closed atomic.Bool
}

// cfgConntrack is the constant that enables lookups in nf_conntrack.
const cfgConntrack = "cfg_conntrack"

// cfgCast is the constant that enables direct reads of the kernel's sk_buff.
const cfgCast = "cfg_cast"

func boolean(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// hasConntrack reports whether the programs of services are to look up connections in nf_conntrack.
func (o Options) hasConntrack() (bool, error) {
	if !o.Services {
		return false, nil
	}
	return o.build.conntrack()
}

// Reload loads the programs again if nf_conntrack has become available since they were loaded; as a module it
// may be loaded at any time. Programs that use the module keep it loaded. Reload reports whether there are new
// programs, which the caller must attach.
func (k *Kernel) Reload() (bool, error) {
	k.reloading.Lock()
	defer k.reloading.Unlock()
	if k.conntrack || k.opened.ValidateOnly {
		return false, nil
	}
	found, err := k.opened.hasConntrack()
	if err != nil || !found {
		return false, err
	}
	if err := k.Programs.Reload(k.constants(true)); err != nil {
		return false, err
	}
	k.conntrack = true
	k.opened.Log.Info("programs reloaded: they can now look up connections in nf_conntrack")
	return true, nil
}

// NodeNumbers returns the IDs of other nodes that occur in the ipcache and in connections, sorted.
func (k *Kernel) NodeNumbers() ([]uint16, error) {
	numbers := map[uint16]struct{}{}
	entries, err := k.Addresses.List()
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		numbers[e.Node] = struct{}{}
	}
	err = k.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			numbers[cs[i].Value.Node] = struct{}{}
		}
		return nil
	})
	delete(numbers, 0)
	return slices.Sorted(maps.Keys(numbers)), err
}

// OverlayAddrs returns the source addresses of the local node for packets through the tunnel to backends on
// other nodes, as this process or an earlier one has written them; at most one per family.
func (k *Kernel) OverlayAddrs() (addrs []netip.Addr, err error) {
	local, err := k.Nodes.Local()
	if err != nil {
		return nil, err
	}
	for _, place := range local.Sources[nodemap.SourceOverlay:nodemap.SourceUplink] {
		a, err := k.Endpoints.OwnAt(place)
		if err != nil {
			return nil, err
		}
		if a.IsValid() {
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

type tableMaps = policymap.Maps

// Policies combines the policy tables and the endpoints that refer to them.
type Policies struct {
	*tableMaps
	*endpointmap.Maps
}

// Policies returns the handles for the owner of policies.
func (k *Kernel) Policies() Policies { return Policies{k.Tables, k.Endpoints} }

// Barrier frees retired tables.
func (p Policies) Barrier(ctx context.Context) error { return p.tableMaps.Barrier(ctx) }

// Open adopts the pinned maps in o.Dir whose layout is the layout of this build, creates missing maps, and
// loads the programs against them.
//
// An existing pinned map is never recreated: the layout is part of the pin's name (sl_ep_v1_<hash>), so a map
// with another layout has another pin. A pinned program is adopted, too, if it was loaded from the same code
// with the same maps and constants; its filters need not be replaced.
//
// Open changes no endpoint. It completes deletions that a killed process has left half-done: it removes keys
// whose endpoint does not have them.
func Open(ctx context.Context, o Options) (_ *Kernel, err error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	k := &Kernel{opened: o}
	defer func() {
		if err != nil {
			k.Close()
		}
	}()

	spec, err := o.build.maps()
	if err != nil {
		return nil, fmt.Errorf("read the compiled maps: %w", err)
	}
	if !o.Services {
		servicemap.Shrink(spec)
	}
	if k.Pins, err = pin.Open(pin.Options{Dir: o.Dir, ValidateOnly: o.ValidateOnly, Log: o.Log}, spec); err != nil {
		return nil, err
	}
	k.Addresses = ipmap.Open(k.Pins)
	k.IPCache = ipcache.New(k.Addresses, o.Log)
	k.Nodes = nodemap.Open(k.Pins)
	k.Namespaces = sockets.OpenNamespaces(k.Pins)
	k.Proxies = proxymap.Open(k.Pins)
	k.Endpoints = endpointmap.Open(k.Pins, k.IPCache, endpointmap.Options{
		Reserved: o.ReservedEndpoints, Services: o.Services, Log: o.Log,
	})
	k.Bounds = bound.Open(k.Pins)
	k.Events = event.Open(k.Pins, k.Bounds)
	if k.Translations, err = translation.Open(k.Pins, k.Endpoints, k.Bounds); err != nil {
		return nil, err
	}
	k.Connections, err = conntrack.Open(k.Pins, conntrack.Options{
		Endpoints: k.Endpoints, Bounds: k.Bounds, Worlds: o.worlds(), KeepAnswers: k.Translations.KeepAnswers,
		Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	if !o.ValidateOnly {
		if err := k.keepPorts(); err != nil {
			return nil, err
		}
	}
	if k.Tables, err = policymap.Open(k.Pins, k.Endpoints, o.Log); err != nil {
		return nil, err
	}
	if k.Services, err = servicemap.Open(k.Pins, servicemap.Options{Log: o.Log}); err != nil {
		return nil, err
	}
	k.Replicas = dryrun.New(k.Pins, o.build.programs, o.replicaConstants())
	if !o.ValidateOnly {
		if err := k.initialise(ctx, o.PodCIDRs); err != nil {
			return nil, err
		}
	}
	if k.conntrack, err = o.hasConntrack(); err != nil {
		return nil, err
	}
	if k.cast, err = o.build.cast(); err != nil {
		return nil, err
	}
	k.Programs, err = program.Open(k.Pins, program.Options{
		Table: o.table(), Constants: k.constants(k.conntrack), Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	switch {
	case o.Sockets != nil:
		hooks := k.Programs.On(program.Sockets)
		if k.Sockets, err = sockets.Open(o.Dir, hooks, *o.Sockets, o.ValidateOnly, o.Log); err == nil {
			k.SocketList, err = socketlist.Open(k.Pins.Map(bpf.MapsMapSlSk))
		}
	case !o.ValidateOnly:
		err = sockets.Detach(o.Dir)
	}
	if err != nil {
		return nil, err
	}
	if len(k.Pins.PreviousNames()) > 0 {
		k.opened.Log.Info("connections of an earlier version are migrated when their next packet arrives", "maps",
			k.Pins.PreviousNames())
	}
	return k, nil
}

// keepPorts sets the bits of the ports in existing records, if the bitmap is newer than the records.
func (k *Kernel) keepPorts() error {
	if !k.Pins.Created(bpf.MapsMapSlCount) {
		return nil
	}
	counts, err := count.Open(k.Pins)
	if err != nil {
		return err
	}
	err = k.Translations.Each(func(t translation.Translation) error {
		switch {
		case t.Record:
			counts.KeepPort(count.Answered, t.Source.Port())
		case t.Answer && t.Copy:
			counts.KeepPort(count.Claimed, t.Asked.Port())
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the records of answers: %w", err)
	}
	err = k.Connections.Each(func(cs []conntrack.Connection) error {
		for _, c := range cs {
			if c.Asked {
				counts.KeepPort(count.Asked, c.Responder.Port())
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the records of requested host addresses: %w", err)
	}
	return nil
}

// initialise prepares adopted and new maps for use. It requires that no other process writes them.
func (k *Kernel) initialise(ctx context.Context, podCIDRs []netip.Prefix) error {
	if k.Pins.Created(bpf.MapsMapSlGen) && k.Pins.Adopted {
		if err := k.Endpoints.ContinueEpochs(k.Connections.EachEpoch); err != nil {
			return fmt.Errorf("restore the epoch counter: %w", err)
		}
	}
	if err := k.Endpoints.Initialise(); err != nil {
		return err
	}
	if err := k.Connections.Initialise(); err != nil {
		return err
	}
	local, err := k.Endpoints.Local()
	if err != nil {
		return err
	}
	if k.Pins.Adopted && (k.Pins.Created(bpf.MapsMapSlPodXl4) || k.Pins.Created(bpf.MapsMapSlPodAnswers4)) {
		if err := errors.Join(k.Translations.AdoptPods(local), k.Bounds.AdoptAffinity(local)); err != nil {
			return err
		}
	}
	isLocal := func(a netip.Addr) bool { _, ok := local[a]; return ok }
	if len(podCIDRs) == 0 {
		if podCIDRs, err = k.Addresses.Ranges(); err != nil {
			return err
		}
	}
	if err := k.IPCache.Initialise(podCIDRs, isLocal); err != nil {
		return fmt.Errorf("initialise the ipcache: %w", err)
	}
	// A run of a program that is still in progress may use an endpoint ID that the last process unpublished just before
	// it ended.
	if k.Pins.Adopted {
		if err := pin.GracePeriod(ctx); err != nil {
			return err
		}
	}
	if err := k.Tables.RemoveLeftovers(); err != nil {
		return fmt.Errorf("remove leftovers of policy tables: %w", err)
	}
	if err := k.Services.RemoveLeftovers(); err != nil {
		return err
	}
	counts, err := count.Open(k.Pins)
	if err != nil {
		return err
	}
	return k.direct.adopt(counts, k.Services.Keys)
}

func (o *Options) setDefaults() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{pin.ErrInvalid}, args...)...))
	}
	if o.Dir == "" {
		bad("Dir is empty")
	}
	for i, p := range o.PodCIDRs {
		switch {
		case !p.IsValid() || p.Addr().Is4In6() || p != p.Masked():
			bad("PodCIDRs: %v is not a masked prefix", p)
		case slices.ContainsFunc(o.PodCIDRs[:i], p.Overlaps):
			bad("PodCIDRs: %v overlaps an earlier one", p)
		}
	}
	if o.Sockets != nil && !o.Services {
		bad("Sockets without Services")
	}
	if len(o.TunnelPorts) > MaxTunnelPorts {
		bad("TunnelPorts: %d, at most %d", len(o.TunnelPorts), MaxTunnelPorts)
	}
	if slices.Contains(o.TunnelPorts, 0) {
		bad("TunnelPorts: 0 is not a port")
	}
	if len(o.TunnelPorts) == 0 {
		o.TunnelPorts = []uint16{DefaultTunnelPort}
	}
	if o.shortcut() && !slices.Contains(o.TunnelPorts, o.TunnelPort) {
		bad("TunnelPort: %d is not one of TunnelPorts %v, which pods may not reach", o.TunnelPort, o.TunnelPorts)
	}
	o.EventsPerSecond = cmp.Or(o.EventsPerSecond, 64)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.build.maps == nil {
		o.build.maps, o.build.programs = bpf.LoadMaps, program.Table()
	}
	if o.build.conntrack == nil {
		o.build.conntrack = program.HasConntrack
	}
	if o.build.cast == nil {
		o.build.cast = program.HasCast
	}
	return errors.Join(errs...)
}

// Worlds returns the identities of addresses outside the ipcache, for IPv4 and IPv6.
func (k *Kernel) Worlds() [2]identity.Numeric { return k.opened.worlds() }

// TunnelPorts returns the UDP ports of nodes that pods may not reach.
func (k *Kernel) TunnelPorts() []uint16 { return k.opened.TunnelPorts }

// worlds returns the identities of addresses outside the ipcache, for IPv4 and IPv6. If the pod CIDRs may still
// change, both families are possible.
func (o Options) worlds() [2]identity.Numeric {
	families := map[bool]struct{}{}
	for _, p := range o.PodCIDRs {
		families[p.Addr().Is4()] = struct{}{}
	}
	if len(families) == 1 {
		return [2]identity.Numeric{identity.World, identity.World}
	}
	return [2]identity.Numeric{identity.WorldIPv4, identity.WorldIPv6}
}

// PinnedRanges returns the pod CIDRs in the ipcache that is pinned in a directory; none if there is no pin.
func PinnedRanges(dir string) ([]netip.Prefix, error) {
	spec, err := bpf.LoadMaps()
	if err != nil {
		return nil, fmt.Errorf("read the compiled maps: %w", err)
	}
	servicemap.Shrink(spec)
	pins, err := pin.Open(pin.Options{Dir: dir, ValidateOnly: true, Log: slog.New(slog.DiscardHandler)}, spec)
	if err != nil {
		return nil, err
	}
	ranges, err := ipmap.Open(pins).Ranges()
	return ranges, errors.Join(err, pins.Close())
}

// constants returns the constants for the options and the features of the kernel.
func (k *Kernel) constants(conntrack bool) map[string]any {
	constants := k.opened.constants()
	constants[cfgConntrack], constants[cfgCast] = boolean(conntrack), boolean(k.cast)
	return constants
}

// constants returns the values of the constants in config.h that depend on the options alone.
func (o Options) constants() map[string]any {
	var ports [MaxTunnelPorts]uint16
	copy(ports[:], o.TunnelPorts)
	worlds := o.worlds()
	connectionEvents := uint32(1)
	if o.NoConnectionEvents {
		connectionEvents = 0
	}
	copyDSCP := uint32(0)
	if o.CopyDSCP {
		copyDSCP = 1
	}
	translateAll := uint32(0)
	if o.Sockets != nil && o.Sockets.TranslateAll {
		translateAll = 1
	}
	direct := uint16(0)
	if o.shortcut() {
		direct = o.TunnelPort
	}
	services, native := uint32(0), uint32(0)
	if o.Services {
		services = 1
	}
	if o.Routing == RoutingNative {
		native = 1
	}
	return map[string]any{
		"cfg_services":          services,
		"cfg_native":            native,
		"cfg_translate_all":     translateAll,
		"cfg_direct_port":       direct,
		"cfg_tunnel_ports":      ports,
		"cfg_world4":            uint32(worlds[0]),
		"cfg_world6":            uint32(worlds[1]),
		"cfg_event_rate":        o.EventsPerSecond,
		"cfg_connection_events": connectionEvents,
		"cfg_tunnel_dscp":       copyDSCP,
	}
}

// replicaConstants returns the constants for Replicas. They see packets to backends, because their caller looks up
// services before it runs them.
func (o Options) replicaConstants() map[string]any {
	constants := o.constants()
	constants["cfg_services"] = uint32(0)
	constants["cfg_direct_port"] = uint16(0) // they send nothing
	return constants
}

func (o Options) shortcut() bool { return o.Shortcut && o.Routing == RoutingOverlay }

// table returns the programs that the options require.
func (o Options) table() []program.Spec {
	devices := append(o.Routing.devices(), program.Taps, program.ProxyNamespaces)
	if o.Sockets != nil {
		devices = append(devices, program.Sockets)
	}
	// also without other nodes: requests from outside to services arrive there
	if o.Services && !slices.Contains(devices, program.Uplinks) {
		devices = append(devices, program.Uplinks)
	}
	other := func(s program.Spec) bool {
		if s.Name == program.FromUnderlay {
			return !o.shortcut()
		}
		return !slices.Contains(devices, s.Devices)
	}
	return slices.DeleteFunc(slices.Clone(o.build.programs), other)
}

// DropOldPrograms removes the pins of earlier programs. From then on the collector drains the maps that only
// those programs write. Call it when every filter has been replaced.
func (k *Kernel) DropOldPrograms() error {
	if k.opened.ValidateOnly {
		return pin.ErrValidateOnly
	}
	k.Connections.FiltersReplaced()
	return k.Programs.DropOld()
}

// Close closes this process's handles. It detaches and unpins nothing: packets are still forwarded, and the
// next Open adopts the state. Later calls return ErrClosed. Readers of events are closed by their owners.
func (k *Kernel) Close() error {
	if k.closed.Swap(true) {
		return nil
	}
	var errs []error
	if k.Replicas != nil {
		errs = append(errs, k.Replicas.Close())
	}
	if k.Tables != nil {
		k.Tables.Close()
	}
	if k.Services != nil {
		k.Services.Close()
	}
	if k.Connections != nil {
		errs = append(errs, k.Connections.Close())
	}
	if k.Events != nil {
		k.Events.Close()
	}
	if k.Endpoints != nil {
		k.Endpoints.Close()
		k.Addresses.Close()
		k.Nodes.Close()
		k.Namespaces.Close()
		k.Proxies.Close()
		k.Translations.Close()
		k.Bounds.Close()
	}
	if k.Sockets != nil {
		errs = append(errs, k.Sockets.Close())
	}
	if k.SocketList != nil {
		errs = append(errs, k.SocketList.Close())
	}
	if k.Programs != nil {
		errs = append(errs, k.Programs.Close())
	}
	if k.Pins != nil {
		errs = append(errs, k.Pins.Close())
	}
	return errors.Join(errs...)
}
