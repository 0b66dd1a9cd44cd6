// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// cgroup is the directory at which the programs of sockets are attached. Beside the
// first version, cgroup2 is mounted below the directory.
func (c LoadBalancingConfig) cgroup() string {
	dir := cmp.Or(c.Cgroup, "/sys/fs/cgroup")
	for _, dir := range []string{dir, filepath.Join(dir, "unified")} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && uint32(st.Type) == unix.CGROUP2_SUPER_MAGIC {
			return dir
		}
	}
	return dir
}

// sockets say whose sockets reach services; nil: nobody's do.
func (c LoadBalancingConfig) sockets() *sockets.Options {
	if !c.on() {
		return nil
	}
	// A cgroup that somebody names is meant, if it is not the root.
	return &sockets.Options{
		Cgroup:       c.cgroup(),
		Subtree:      c.Cgroup != "",
		TranslateAll: c.OtherNamespaces == othersTranslate,
	}
}

// followSockets has the sockets of the node and of its containers reach services, and
// puts right what others have changed of that.
func (n *node) followSockets(ctx context.Context) error {
	compare := true
	name := func() error {
		err := n.nameSockets(compare)
		compare = compare && err != nil
		return err
	}
	if err := name(); err != nil {
		n.log.ErrorContext(ctx, "namespaces not named, trying again later", log.Err(err))
	}
	// Programs that found no services yet would translate nothing.
	select {
	case <-n.Frontends.Synced():
	case <-n.HostPorts.Held(): // they need no sluice-loadbalancer
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		err := n.Kernel.Sockets.Attach()
		if err == nil {
			break
		}
		// The process is not ready meanwhile, and endpoints have their traffic.
		n.log.ErrorContext(ctx, "sockets do not reach services, trying again", log.Err(err))
		select {
		case <-time.After(comparisonPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	close(n.attached)
	return n.every(ctx, serviceInterval, "sockets of services", func() error {
		found, err := n.Kernel.Sockets.Audit()
		if len(found) > 0 {
			n.log.WarnContext(ctx, "programs of sockets put back", "differences", found)
			err = errors.Join(err, n.Kernel.Sockets.Attach())
		}
		return errors.Join(err, name())
	})
}

// nameSockets compares the map of namespaces with the endpoints. A new endpoint has
// its namespace in the map already: what lacks are those of a process that translated
// no services, and those of a namespace whose first endpoint has gone. With cookies it
// opens the namespaces of all endpoints, for a map that was left alone meanwhile: a slot
// in it may have been given to another endpoint since.
func (n *node) nameSockets(cookies bool) error {
	cookie, err := n.home.Cookie()
	if err != nil {
		return err
	}
	if err := n.Kernel.Namespaces.Set(sockets.Namespace{Cookie: cookie, Slot: slotmap.HostSlot}); err != nil {
		return err
	}
	// In this order: an entry is added after its slot was published and goes before.
	known, err := n.Kernel.Namespaces.List()
	if err != nil {
		return err
	}
	published, err := n.Kernel.Endpoints.List()
	if err != nil {
		return err
	}
	live, named, leave := map[uint16]bool{slotmap.HostSlot: true}, map[uint16]bool{}, map[uint16]bool{}
	for _, e := range published {
		live[e.Slot] = true
	}
	var errs []error
	own := map[uint16]uint64{slotmap.HostSlot: cookie}
	ready := slices.DeleteFunc(n.Core.List(), func(e endpoint.Endpoint) bool { return e.State != endpoint.Ready })
	if cookies {
		errs = append(errs, n.readCookies(ready, own))
	}
	for _, e := range ready {
		leave[e.Slot] = e.Spec.LeaveSockets
	}
	for _, k := range known {
		if is, ok := own[k.Slot]; live[k.Slot] && (!ok || is == k.Cookie) {
			named[k.Slot] = k.Leave == leave[k.Slot] // else it is named again
			continue
		}
		errs = append(errs, n.Kernel.Namespaces.Remove(k.Cookie, k.Slot))
	}
	for _, e := range ready {
		if !named[e.Slot] {
			errs = append(errs, n.nameSocketsOf(e))
		}
	}
	return errors.Join(errs...)
}

// readCookies adds the cookie of each endpoint's namespace, by slot.
func (n *node) readCookies(es []endpoint.Endpoint, cookies map[uint16]uint64) error {
	var errs []error
	for _, e := range es {
		errs = append(errs, n.inNamespaceOf(e, func(ns endpoint.Namespace) (err error) {
			cookie, err := ns.Cookie()
			if err == nil {
				cookies[e.Slot] = cookie
			}
			return err
		}))
	}
	return errors.Join(errs...)
}

// nameSocketsOf adds the namespace of an endpoint.
func (n *node) nameSocketsOf(e endpoint.Endpoint) error {
	return n.inNamespaceOf(e, func(ns endpoint.Namespace) error {
		cookie, err := ns.Cookie()
		if err == nil {
			err = n.Kernel.Namespaces.Claim(sockets.Namespace{Cookie: cookie, Slot: e.Slot, Leave: e.Spec.LeaveSockets})
		}
		if err != nil {
			return err
		}
		// Its endpoint may have gone meanwhile, and another one may have the namespace.
		if now, err := n.Core.Get(e.Spec.Owner); err != nil || now.Slot != e.Slot {
			return n.Kernel.Namespaces.Remove(cookie, e.Slot)
		}
		return nil
	})
}

// eachNamespace calls fn with the network namespaces of the node and of its endpoints,
// also of those that are not ready: the processes of one that waits for its policy after
// a restart run. It goes on after an error of fn, and returns all.
func (n *node) eachNamespace(ctx context.Context, fn func(*netns.Namespace) error) error {
	errs := []error{fn(n.home)}
	for _, e := range n.Core.List() {
		if ctx.Err() == nil {
			errs = append(errs, n.inNamespaceOf(e, func(ns endpoint.Namespace) error { return fn(netdev.Netns(ns)) }))
		}
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// inNamespaceOf calls fn with the open network namespace of an endpoint, unless that
// has gone: then the endpoint's deletion follows, and its sockets go with it.
func (n *node) inNamespaceOf(e endpoint.Endpoint, fn func(endpoint.Namespace) error) error {
	ns, err := n.dev.OpenNamespace(e.Spec.Netns)
	if errors.Is(err, endpoint.ErrNamespaceGone) || errors.Is(err, endpoint.ErrNamespace) {
		return nil
	}
	if err == nil {
		err = errors.Join(fn(ns), ns.Close())
	}
	if err != nil {
		return fmt.Errorf("sockets of %s: %w", e.Spec.Owner, err)
	}
	return nil
}

// hostPortWarnings name the host ports that lead nowhere.
func (n *node) hostPortWarnings() []string {
	if n.HostPorts != nil {
		return n.HostPorts.Warnings()
	}
	var lines []string
	for _, e := range n.Core.List() {
		if len(e.Spec.PortMappings) > 0 {
			lines = append(lines, fmt.Sprintf("endpoint %s: its host ports lead nowhere: loadBalancing.mode is off", e.Spec.Owner))
		}
	}
	return lines
}

// numberUsers are all who name numbers of fronts and backends.
type numberUsers struct{ *node }

// Named implements servicemap.Users: connected UDP sockets, translations of packets, and
// connections, whose answers come from the front.
func (u numberUsers) Named(ctx context.Context) (servicemap.Numbers, error) {
	named := servicemap.NoNumbers()
	if u.Ender != nil {
		var err error
		if named, err = u.Ender.Named(ctx); err != nil {
			return named, err
		}
	}
	err := u.Kernel.Translations.Each(func(t translation.Translation) error {
		named.Name(t.Front, t.Backend.Addr().Is6(), t.Number)
		return ctx.Err()
	})
	return named, errors.Join(err, u.Kernel.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			named.Fronts[cs[i].Value.Front] = struct{}{}
		}
		return ctx.Err()
	}))
}
