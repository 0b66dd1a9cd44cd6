// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"golang.org/x/sys/unix"
)

// residents are the labels of four pods in two namespaces and of the world, by identity.
var residents = map[identity.Numeric]label.Set{
	300: label.NewSet(label.Kubernetes("app", "web"), label.Kubernetes(label.KeyNamespace, "shop")),
	301: label.NewSet(label.Kubernetes("app", "db"), label.Kubernetes(label.KeyNamespace, "shop")),
	302: label.NewSet(label.Kubernetes("app", "web"), label.Kubernetes(label.KeyNamespace, "evil")),
	303: label.NewSet(label.Kubernetes("app", "db"), label.Kubernetes(label.KeyNamespace, "evil")),
	9:   label.NewSet(label.Reserved(identity.NameWorldIPv4)),
}

// settleIn adds the pods to an owner, with a datapath that wants their tables.
func settleIn(t *testing.T, o *Owner) {
	t.Helper()
	var ids []peer.Identity
	var subjects []identity.Numeric
	for n, ls := range residents {
		id, err := peer.New(n, ls)
		if err != nil {
			t.Fatal(err)
		}
		if ids = append(ids, id); n != 9 {
			subjects = append(subjects, n)
		}
	}
	if err := o.Identities().SetIdentities(t.Context(), ids, nil); err != nil {
		t.Fatal(err)
	}
	want := Subscription{Name: "datapath", Role: RoleEnforces, Interest: Interest{Subjects: subjects}}
	if _, err := o.Subscribers().Subscribe(t.Context(), want); err != nil {
		t.Fatal(err)
	}
}

// allowed returns the connections that the tables of an owner allow.
func allowed(t *testing.T, o *Owner) map[string]bool {
	t.Helper()
	var ends []query.Peer
	for n := range residents {
		if n != 9 {
			ends = append(ends, query.Peer{Identity: n})
		}
	}
	for _, a := range []string{"192.0.2.1", "198.51.100.1"} {
		ends = append(ends, query.Peer{Identity: 9, Addr: netip.MustParseAddr(a)})
	}
	out := make(map[string]bool)
	for _, from := range ends {
		for _, to := range ends {
			if from.Identity == to.Identity {
				continue
			}
			for _, p := range []uint16{80, 443} {
				x, err := o.Reader().Explain(t.Context(), from, to, port.At(port.TCP, p))
				if err != nil {
					t.Fatal(err)
				}
				if x.Action == policytable.Allow {
					out[fmt.Sprintf("%d %s -> %d %s:%d", from.Identity, from.Addr, to.Identity, to.Addr, p)] = true
				}
			}
		}
	}
	return out
}

// writer generates random objects.
type writer struct {
	*rand.Rand
	made int
}

func pick[T any](w *writer, list ...T) T { return list[w.IntN(len(list))] }

func (w *writer) selector(cilium bool) string {
	s := pick(w, `{}`, `{"matchLabels":{"app":"web"}}`, `{"matchLabels":{"app":"db"}}`)
	if cilium && w.IntN(3) == 0 {
		s = `{"matchLabels":{"k8s:io.kubernetes.pod.namespace":"` + pick(w, "shop", "evil") + `"}}`
	}
	return s
}

// several returns up to two parts, separated by commas.
func (w *writer) several(part func() string) string {
	var parts []string
	for range w.IntN(3) {
		parts = append(parts, part())
	}
	return strings.Join(parts, ",")
}

func (w *writer) network() string {
	side := func(name string) func() string {
		return func() string {
			peer := pick(w, `{"podSelector":`+w.selector(false)+`}`, `{"namespaceSelector":{}}`,
				`{"ipBlock":{"cidr":"192.0.2.0/24"}}`)
			return `{"` + name + `":[` + peer + `]` + pick(w, "", `,"ports":[{"port":80}]`) + `}`
		}
	}
	return fmt.Sprintf(`"podSelector":%s,"policyTypes":%s,"ingress":[%s],"egress":[%s]`, w.selector(false),
		pick(w, `["Ingress"]`, `["Egress"]`, `["Ingress","Egress"]`), w.several(side("from")), w.several(side("to")))
}

func (w *writer) cilium() string {
	side := func(way string, ports bool) func() string {
		return func() string {
			peer := pick(w, `"`+way+`Endpoints":[`+w.selector(true)+`]`, `"`+way+`CIDR":["192.0.2.0/24"]`,
				`"`+way+`CIDRSet":[{"cidrGroupRef":"office"}]`, `"`+way+`Entities":["all"]`)
			return `{` + peer + pick(w, "", `,"toPorts":[{"ports":[{"port":"80","protocol":"TCP"}]}]`) + `}`
		}
	}
	return fmt.Sprintf(`"endpointSelector":%s,"enableDefaultDeny":{"ingress":%t,"egress":%t},`+
		`"ingress":[%s],"ingressDeny":[%s],"egress":[%s],"egressDeny":[%s]`,
		w.selector(true), w.IntN(2) == 0, w.IntN(2) == 0, w.several(side("from", true)), w.several(side("from", true)),
		w.several(side("to", true)), w.several(side("to", true)))
}

// change is an object or its removal, with a possible fault.
type change struct {
	key  policy.Key
	put  *policy.Written // as wanted by the source; nil: removed
	bad  *policy.Written // as it is delivered
	what string
}

func (w *writer) change() change {
	w.made++
	name := fmt.Sprint("p", w.IntN(3))
	ns := pick(w, "shop", "evil")
	var k policy.Key
	var version, spec string
	switch w.IntN(7) {
	case 0, 1, 2:
		k, version, spec = policy.Key{Kind: "NetworkPolicy", Namespace: ns, Name: name}, "networking.k8s.io/v1", w.network()
	case 3, 4:
		k, version, spec = policy.Key{Kind: "CiliumNetworkPolicy", Namespace: ns, Name: name}, "cilium.io/v2", w.cilium()
	case 5:
		k, version, spec = policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: name}, "cilium.io/v2", w.cilium()
	default:
		k, version, spec = policy.Key{Kind: "CiliumCIDRGroup", Name: "office"}, "cilium.io/v2",
			`"externalCIDRs":`+pick(w, `[]`, `["192.0.2.0/24"]`, `["192.0.2.0/24","198.51.100.0/24"]`)
	}
	c := change{key: k, what: "written"}
	if w.IntN(5) == 0 {
		c.what = "removed"
		return c
	}
	written := func(spec, after string) *policy.Written {
		x := object(version, k, `"spec":{`+spec+`}`)
		if k.Namespace == "" {
			x.Text = []byte(strings.Replace(string(x.Text), `,"namespace":""`, "", 1))
		}
		x.Text = append(x.Text, after...)
		x.Created = time.Unix(int64(1_000_000+w.made), 0)
		return &x
	}
	c.put = written(spec, "")
	c.bad = c.put
	switch w.IntN(6) {
	case 0:
		c.what, c.bad = "with an unknown field", written(spec+`,"novel":true`, "")
	case 1:
		if k.Kind != "CiliumCIDRGroup" { // groups are not limited
			c.what, c.bad = "larger than the share", written(spec, strings.Repeat(" ", 300_000))
		}
	case 2:
		c.what, c.bad = "not readable", written(spec+`,"externalCIDRs":["nowhere"],"podSelector":7,"endpointSelector":7`, "")
	case 3:
		if k.Kind != "NetworkPolicy" {
			break
		}
		// More intervals than a class may have. The part that fits is enforced, so the earlier state is not a bound.
		first := func(ports string) string {
			return strings.Replace(spec, `,"ingress":[`, `,"ingress":[{"ports":[`+ports+`]}`+`,`, 1)
		}
		var ports []string
		for i := range 2100 {
			ports = append(ports, fmt.Sprintf(`{"port":%d}`, 1000+2*i))
		}
		c.what = "applied as far as it fits into its table"
		c.put, c.bad = written(first(`{"port":1000,"endPort":5300}`), ""), written(first(strings.Join(ports, ",")), "")
		for _, x := range []*policy.Written{c.put, c.bad} {
			x.Text = []byte(strings.Replace(string(x.Text), "]},]", "]}]", 1))
		}
	}
	return c
}

// subset reports the connections of a that are missing in at least one other set.
func subset(t *testing.T, what string, a map[string]bool, sets ...map[string]bool) {
	t.Helper()
	for _, b := range sets {
		for connection := range a {
			if !b[connection] {
				t.Errorf("%s: %s is allowed", what, connection)
			}
		}
	}
}

// TestFailedChangeNeverOpens (INV-54) makes a change fail in every way. Until the change succeeds, the enforced state
// allows nothing that the former state or the desired state denies.
func TestFailedChangeNeverOpens(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := &writer{Rand: rand.New(rand.NewPCG(seed, 34))}
			c := &clock{now: time.Unix(2_000_000, 0)}
			root := t.TempDir()
			dir := filepath.Join(root, "policy")
			sources := []string{source.Identity, managed.SourceKubernetes}
			limits := func(cfg *Config) { cfg.Now, cfg.MaxPolicies, cfg.MaxManifestBytes = c.Now, 14, 300_000 }
			// The model contains the wanted objects, and has capacity for them.
			m, _ := runWith(t, t.TempDir(), sources)
			model := deltas{m.Objects(managed.SourceKubernetes), t}
			model.complete()
			settleIn(t, m)
			var last map[string]bool
			onDiskWith(t, disktest.New(t, root), dir, sources, func(o *Owner, disk *disktest.Disk) {
				d := deltas{o.Objects(managed.SourceKubernetes), t}
				d.complete()
				settleIn(t, o)
				failChanges(t, w, c, d, model, disk)
				last = allowed(t, o)
			}, limits)
			if t.Failed() {
				return
			}
			o, _ := runWith(t, dir, sources, limits)
			settleIn(t, o)
			subset(t, "after a restart", allowed(t, o), last)
		})
	}
}

// onDiskWith is onDisk with sources and another configuration.
func onDiskWith(t *testing.T, disk *disktest.Disk, dir string, sources []string,
	f func(*Owner, *disktest.Disk), change func(*Config),
) {
	t.Helper()
	config := Config{
		Engine:   engine.Config{Cluster: "default", AllowHost: true},
		MaxNames: 10, MaxAddresses: 20, NameGrace: time.Minute, Linger: time.Hour,
		Stream: stream.Defaults(), Log: log.Discard(),
	}
	change(&config)
	o, err := New(config, dir, sources)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		f(o, disk)
	}()
	disk.Run(t, func() {
		if err := o.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	<-done
	if err := o.Close(); err != nil {
		t.Error(err)
	}
}

// failChanges makes changes, most of which fail, and compares with the model.
func failChanges(t *testing.T, w *writer, c *clock, d, model deltas, disk *disktest.Disk) {
	t.Helper()
	listed := make(map[policy.Key]struct{})
	for step := range 14 {
		ch := w.change()
		before := allowed(t, model.owner)
		give := func(x deltas, form *policy.Written) error {
			changes := watch.Changes[policy.Key, policy.Written]{}
			if form != nil {
				changes.Upserts = map[policy.Key]policy.Written{ch.key: *form}
			} else {
				changes.Deletes = map[policy.Key]struct{}{ch.key: {}}
			}
			return x.Apply(t.Context(), changes)
		}
		if err := give(model, ch.put); err != nil {
			t.Fatal(err)
		}
		if listed[ch.key] = struct{}{}; ch.put == nil {
			delete(listed, ch.key)
		}
		wanted := allowed(t, model.owner)
		full := w.IntN(3) == 0
		if full {
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
					return unix.ENOSPC
				}
				return nil
			})
			ch.what += ", on a full disk"
		}
		err := give(d, ch.bad)
		what := fmt.Sprintf("step %d: %s is %s (%v)", step, ch.key, ch.what, err)
		now := allowed(t, d.owner)
		subset(t, what, now, wanted)
		if !slices.Contains([]string{"written", "removed", "applied as far as it fits into its table"}, ch.what) {
			subset(t, what+", as before", now, before)
		}
		if full {
			disk.Fail(nil)
			if err := give(d, ch.bad); err != nil {
				t.Fatal(err)
			}
			subset(t, what+", and again", allowed(t, d.owner), wanted)
		}
		if err := d.Failed(t.Context(), errors.New("the API server is unavailable")); err != nil {
			t.Fatal(err)
		}
		subset(t, what+", and the source is unreachable", allowed(t, d.owner), wanted)
		if step%5 == 4 {
			d.complete(slices.Collect(maps.Keys(listed))...)
			settle(t, d.owner, c)
			subset(t, what+", with new levels", allowed(t, d.owner), wanted)
		}
		if t.Failed() {
			if ch.put != nil {
				t.Logf("%s", ch.bad.Text[:min(len(ch.bad.Text), 2000)])
			}
			return
		}
		if ch.bad != ch.put { // the author corrects the object
			if err := give(d, ch.put); err != nil {
				t.Fatal(err)
			}
			subset(t, what+", and corrected", allowed(t, d.owner), wanted)
		}
	}
}
