// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Maximum sizes of the content of a record or an endpoint in etcd; larger ones are refused.
const (
	maxRanges    = 64
	maxAddresses = 16
	// maxNodeLabels is the limit of RegisterNode.
	maxNodeLabels = 1000
)

// nodeKeys returns the keys of nodes: keys below ip/ and range/, and the key ipam.
type nodeKeys struct {
	prefix string
	node   string // this node
}

func (k nodeKeys) all() string                  { return k.prefix + "/ip/" }
func (k nodeKeys) below(node string) string     { return k.all() + node + "/" }
func (k nodeKeys) record(node string) string    { return k.below(node) + "node" }
func (k nodeKeys) endpoints(node string) string { return k.below(node) + "ep/" }

// slots returns the prefix of the keys of a node's claims.
func (k nodeKeys) slots(node string) string { return k.below(node) + "range/" }

// slot returns the key of a claim of this node.
func (k nodeKeys) slot(slot registry.Slot) string { return k.slots(k.node) + slot.String() }

// rest returns the key of a range in quarantine. It is below the node that may have the range, so that no other node
// can write it.
func (k nodeKeys) rest(node string, p netip.Prefix) string {
	return k.below(node) + "rest/" + strings.ReplaceAll(p.String(), "/", "_")
}

func (k nodeKeys) ranges() string               { return k.prefix + "/range/default/" }
func (k nodeKeys) holder(p netip.Prefix) string { return k.ranges() + p.String() }

// ipam returns the key of the settings that all nodes agree on.
func (k nodeKeys) ipam() string { return k.prefix + "/ipam" }

// assigned returns the prefix of the keys of assignments. They are below ip/, so that the watch of claims delivers them
// and the copy on the disk contains them. The prefix is not a valid node name, so no node's role allows writing these
// keys.
func (k nodeKeys) assigned() string { return k.all() + ".assigned/" }

// assignment returns the key of the ranges that are assigned to a node.
func (k nodeKeys) assignment(node string) string { return k.assigned() + "of/" + node }

// allAssigned returns the key that exists once the assignments of all nodes were written.
func (k nodeKeys) allAssigned() string { return k.assigned() + "all" }

// watched reports whether a key belongs to a node, or contains the settings of ranges.
func (k nodeKeys) watched(kv *mvccpb.KeyValue) bool {
	return strings.HasPrefix(string(kv.Key), k.all()) || string(kv.Key) == k.ipam()
}

// nodeDecoder decodes the keys of nodes.
type nodeDecoder struct {
	keys nodeKeys
	log  *slog.Logger
}

// record decodes the record of a node.
func (d nodeDecoder) record(kv *mvccpb.KeyValue) (registry.Record, error) {
	r, err := read[registry.Record](kv)
	if err != nil {
		return r, err
	}
	bad := func(a netip.Addr) bool { return !a.IsValid() || a.Zone() != "" || a.Is4In6() }
	switch {
	case r.Incarnation == "":
		err = fmt.Errorf("no incarnation")
	case len(r.Ranges) > maxRanges:
		err = fmt.Errorf("%d ranges, at most %d", len(r.Ranges), maxRanges)
	case slices.ContainsFunc(r.Ranges, func(p netip.Prefix) bool {
		return !p.IsValid() || p != p.Masked() ||
			bad(p.Addr())
	}):
		err = fmt.Errorf("a range is not a valid prefix")
	case len(r.Underlay.Addresses) > maxAddresses, len(r.Underlay.Overlay) > maxAddresses:
		err = fmt.Errorf("more than %d addresses", maxAddresses)
	case slices.ContainsFunc(r.Underlay.Addresses, bad), slices.ContainsFunc(r.Underlay.Overlay, bad):
		err = fmt.Errorf("an address is invalid")
	}
	if err != nil {
		return r, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if len(r.Labels) > maxNodeLabels {
		// Only the labels are ignored: the node keeps its ranges, and its addresses still belong to a remote node.
		d.log.Error("a node in etcd has too many labels; ignoring them", "key", string(kv.Key), "labels", len(r.Labels),
			"at most", maxNodeLabels)
		r.Labels = nil
	}
	return r, nil
}

func readAddresses(kv *mvccpb.KeyValue) (registry.Addresses, error) {
	a, err := read[registry.Addresses](kv)
	if err != nil {
		return a, err
	}
	// A workload on another node never has a reserved or node-local identity.
	if _, err := parseNumber(fmt.Sprint(uint32(a.Identity))); err != nil {
		return a, fmt.Errorf("%s: %w", kv.Key, err)
	}
	if len(a.Addresses) == 0 || len(a.Addresses) > maxAddresses ||
		slices.ContainsFunc(a.Addresses, func(a netip.Addr) bool {
			return !a.IsValid() || a.Zone() != "" ||
				a.Is4In6()
		}) {
		return a, fmt.Errorf("%s: %w: addresses %v", kv.Key, allocator.ErrCorrupt, a.Addresses)
	}
	return a, nil
}

// update adds a key below ip/, or the settings of ipam, to an update. A key that cannot be read is logged and counts as
// removed, so that it does not hide other keys.
func (d nodeDecoder) update(u *registry.Update, kv *mvccpb.KeyValue, removed bool) {
	if string(kv.Key) == d.keys.ipam() {
		d.settings(u, kv, removed)
		return
	}
	if assigned, ok := strings.CutPrefix(string(kv.Key), d.keys.assigned()); ok {
		d.assignment(u, assigned, kv, removed)
		return
	}
	node, kind, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), d.keys.all()), "/")
	endpoint, isEndpoint := strings.CutPrefix(kind, "ep/")
	if !isEndpoint {
		endpoint = ""
	}
	slot, isSlot := strings.CutPrefix(kind, "range/")
	if !isSlot {
		slot = ""
	}
	rest, isRest := strings.CutPrefix(kind, "rest/")
	var err error
	switch {
	case node == "":
		return
	case isSlot:
		place, ok := registry.ParseSlot(slot)
		if !ok {
			return
		}
		var c registry.Claim
		if removed {
			break
		}
		if c, err = readClaim(kv, place); err == nil {
			u.Claims = append(u.Claims, registry.ClaimKey{Node: node, Slot: place, Claim: c, Revision: kv.ModRevision})
			return
		}
	case isRest:
		d.rest(u, node, rest, kv, removed)
		return
	case kind != "node" && (!isEndpoint || endpoint == ""):
		return // written by a later version
	case removed:
	case isEndpoint:
		var a registry.Addresses
		if a, err = readAddresses(kv); err == nil {
			u.Addresses = append(u.Addresses, registry.AddressesKey{
				Node: node, Endpoint: endpoint, Value: a,
				Revision: kv.ModRevision,
			})
			return
		}
	default:
		var r registry.Record
		if r, err = d.record(kv); err == nil {
			u.Nodes = append(u.Nodes, registry.NodeKey{
				Name: node, Record: r, Created: kv.CreateRevision,
				Revision: kv.ModRevision,
			})
			return
		}
	}
	if err != nil {
		d.log.Error("unreadable node or endpoint in etcd is ignored", log.Err(err))
	}
	u.Removed = append(u.Removed,
		registry.Removal{Node: node, Endpoint: endpoint, Slot: slot, Revision: kv.ModRevision})
}

// settings adds the settings of ipam to an update. While no settings can be read, readers keep using the last ones.
func (d nodeDecoder) settings(u *registry.Update, kv *mvccpb.KeyValue, removed bool) {
	u.IPAM = &registry.IPAMKey{}
	if removed {
		return
	}
	settings, err := readSettings(kv)
	if err != nil {
		d.log.Error("unreadable settings of ipam in etcd are ignored", log.Err(err))
		return
	}
	u.IPAM = &registry.IPAMKey{Settings: settings, Revision: kv.ModRevision}
}

// rest adds a range in quarantine to an update.
func (d nodeDecoder) rest(u *registry.Update, node, rest string, kv *mvccpb.KeyValue, removed bool) {
	p, err := netip.ParsePrefix(strings.ReplaceAll(rest, "_", "/"))
	switch {
	case err != nil || d.keys.rest(node, p) != string(kv.Key):
		return
	case removed:
		u.Removed = append(u.Removed, registry.Removal{Node: node, Rest: p, Revision: kv.ModRevision})
	default:
		u.Resting = append(u.Resting, registry.RestKey{Node: node, Range: p})
	}
}

// readClaim decodes a slot.
func readClaim(kv *mvccpb.KeyValue, slot registry.Slot) (registry.Claim, error) {
	c, err := read[registry.Claim](kv)
	if err != nil {
		return c, err
	}
	if p := c.Range; !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Is6() != slot.IPv6 {
		return c, fmt.Errorf("%s: %w: range %v", kv.Key, allocator.ErrCorrupt, p)
	}
	return c, nil
}

// assignment adds a key of assignments to an update; name is the part after their prefix. An assignment that cannot be
// read assigns nothing.
func (d nodeDecoder) assignment(u *registry.Update, name string, kv *mvccpb.KeyValue, removed bool) {
	if string(kv.Key) == d.keys.allAssigned() {
		u.Assigned, u.Unassigned = !removed, removed
		return
	}
	node, ok := strings.CutPrefix(name, "of/")
	switch {
	case !ok || node == "":
	case removed:
		u.Removed = append(u.Removed, registry.Removal{Node: node, Assignment: true, Revision: kv.ModRevision})
	default:
		a, err := read[registry.Assignment](kv)
		if err == nil {
			err = registry.CheckAssignment(a)
		}
		if err != nil {
			d.log.Error("an unreadable assignment of ranges in etcd is ignored", "node", node, log.Err(err))
			a = registry.Assignment{}
		}
		u.Assignments = append(u.Assignments, registry.AssignmentKey{Node: node, Assignment: a})
	}
}

// readSettings decodes settings of ipam. Fields that this version does not know are ignored.
func readSettings(kv *mvccpb.KeyValue) (registry.IPAM, error) {
	settings, err := read[registry.IPAM](kv)
	slices.SortFunc(settings.Pool, netip.Prefix.Compare)
	return settings, err
}
