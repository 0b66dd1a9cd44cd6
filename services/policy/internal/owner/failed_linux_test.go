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

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/labelfilter"
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

// tiers are labels of residents that identities do not include.
var tiers = map[identity.Numeric]label.Label{
	300: label.Kubernetes("tier", "front"), 301: label.Kubernetes("tier", "back"), 302: label.Kubernetes("tier", "front"),
}

// settleIn adds the pods to an owner, with a datapath that subscribes to their tables. If all is set, identities also
// include the labels of tiers.
func settleIn(t *testing.T, o *Owner, all bool) {
	t.Helper()
	filter := []labelfilter.Rule{{Text: "tier", Counts: all}}
	if err := o.Identities().SetLabelFilter(t.Context(), filter, nil); err != nil {
		t.Fatal(err)
	}
	var ids []peer.Identity
	var subjects []identity.Numeric
	for n, ls := range residents {
		if tier, ok := tiers[n]; ok && all {
			ls = label.NewSet(append(ls.All(), tier)...)
		}
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
	if w.IntN(8) == 0 { // identities leave this label out
		s = pick(w, `{"matchLabels":{"tier":"front"}}`,
			`{"matchExpressions":[{"key":"tier","operator":"NotIn","values":["front"]}]}`)
	}
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
	put  *policy.Written // the desired version; nil: removed
	bad  *policy.Written // the version that is delivered, which may have a fault
	what string
}

// Faults that only some sources can have.
const (
	cutOff     = "cut off"            // a file of which not even the namespace can be read
	misspelt   = "of a misspelt kind" // API servers refuse it
	tooLarge   = "applied as far as it fits into its table"
	byCall     = "a call"
	ofManagers = "argo"
)

// by returns the source of an object.
func by(k policy.Key) string {
	switch {
	case k.Kind == "CiliumCIDRGroup", k.Name == "p0":
		return managed.SourceKubernetes
	case k.Name == "p1":
		return managed.SourceFile
	}
	return byCall
}

// ways delivers objects to an owner through three sources: an API server, files and calls.
type ways struct {
	deltas
	feed  *Feed
	files map[policy.Key][]byte
}

func newWays(t *testing.T, o *Owner) ways {
	return ways{deltas{o.Objects(managed.SourceKubernetes), t}, o.Feed(managed.SourceFile), make(map[policy.Key][]byte)}
}

// give delivers a form of an object through the object's source; nil removes the object.
func (x ways) give(k policy.Key, form *policy.Written) error {
	switch by(k) {
	case managed.SourceFile:
		if delete(x.files, k); form != nil {
			x.files[k] = form.Text
		}
		return x.setFiles()
	case byCall:
		var err error
		if form != nil {
			_, err = x.owner.Upsert(x.t.Context(), form.Text, "", false)
		} else {
			_, err = x.owner.Delete(x.t.Context(), []policy.Key{k}, false)
		}
		return err
	}
	return x.deltas.give(k, form)
}

// setFiles delivers all files.
func (x ways) setFiles() error {
	var files []directory.File
	for _, k := range slices.SortedFunc(maps.Keys(x.files), policy.Key.Compare) {
		files = append(files, directory.File{Origin: strings.ReplaceAll(k.String(), "/", "-") + ".yaml", Data: x.files[k]})
	}
	return x.feed.Set(x.t.Context(), files)
}

// give delivers a form of an object as an API server does.
func (d deltas) give(k policy.Key, form *policy.Written) error {
	changes := watch.Changes[policy.Key, policy.Written]{}
	if form != nil {
		changes.Upserts = map[policy.Key]policy.Written{k: *form}
	} else {
		changes.Deletes = map[policy.Key]struct{}{k: {}}
	}
	return d.Apply(d.t.Context(), changes)
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
	switch w.IntN(8) {
	case 0:
		c.what, c.bad = "with an unknown field", written(spec+`,"novel":true`, "")
	case 1:
		if k.Kind != "CiliumCIDRGroup" { // groups are not limited
			large := *c.put
			large.Text = []byte(strings.Replace(string(large.Text), "{", "{"+strings.Repeat(" ", 300_000), 1))
			c.what, c.bad = "larger than the share", &large
		}
	case 2:
		c.what, c.bad = "not readable", written(spec+`,"externalCIDRs":["nowhere"],"podSelector":7,"endpointSelector":7`, "")
	case 3:
		if k.Kind != "NetworkPolicy" {
			break
		}
		// More intervals than a class may have. The rules that fit are enforced, so connections that the earlier
		// state denied may be allowed.
		first := func(ports string) string {
			return strings.Replace(spec, `,"ingress":[`, `,"ingress":[{"ports":[`+ports+`]}`+`,`, 1)
		}
		var ports []string
		for i := range 2100 {
			ports = append(ports, fmt.Sprintf(`{"port":%d}`, 1000+2*i))
		}
		c.what = tooLarge
		c.put, c.bad = written(first(`{"port":1000,"endPort":5300}`), ""), written(first(strings.Join(ports, ",")), "")
		for _, x := range []*policy.Written{c.put, c.bad} {
			x.Text = []byte(strings.Replace(string(x.Text), "]},]", "]}]", 1))
		}
	case 4:
		if by(k) != managed.SourceKubernetes {
			x := *c.put
			x.Text = []byte(strings.Replace(string(x.Text), "Policy", "Polcy", 1))
			c.what, c.bad = misspelt, &x
		}
	case 5:
		if by(k) == managed.SourceFile {
			x := *c.put
			x.Text = x.Text[:len(x.Text)-3]
			c.what, c.bad = cutOff, &x
		}
	}
	return c
}

// subset reports an error for each connection of a that at least one of the sets lacks.
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

// TestFailedChangeNeverOpens (INV-54) makes changes from an API server, files and calls fail in every possible way.
// Until the change succeeds, the enforced state allows nothing that the former state or the desired state denies.
func TestFailedChangeNeverOpens(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := &writer{Rand: rand.New(rand.NewPCG(seed, 34))}
			c := &clock{now: time.Unix(2_000_000, 0)}
			root := t.TempDir()
			dir := filepath.Join(root, "policy")
			sources := []string{source.Identity, managed.SourceKubernetes, managed.SourceFile}
			limits := func(cfg *Config) { cfg.Now, cfg.MaxPolicies, cfg.MaxManifestBytes = c.Now, 14, 300_000 }
			model := newModel(t)
			var last map[string]bool
			onDiskWith(t, disktest.New(t, root), dir, sources, func(o *Owner, disk *disktest.Disk) {
				d := newWays(t, o)
				d.complete()
				if err := d.setFiles(); err != nil {
					t.Error(err)
				}
				settleIn(t, o, false)
				failChanges(t, w, c, d, model, disk)
				last = allowed(t, o)
			}, limits)
			if t.Failed() {
				return
			}
			o, _ := runWith(t, dir, sources, limits)
			settleIn(t, o, false)
			subset(t, "after a restart", allowed(t, o), last)
		})
	}
}

// newModel returns an owner that contains the desired objects, has capacity for them, and knows all labels.
func newModel(t *testing.T) deltas {
	t.Helper()
	m, _ := runWith(t, t.TempDir(), []string{source.Identity, managed.SourceKubernetes})
	model := deltas{m.Objects(managed.SourceKubernetes), t}
	model.complete()
	settleIn(t, m, true)
	return model
}

// TestFirstStartAllowsNothingThatTheSourcesDeny delivers objects in random order to an owner that has never run, with
// faults and restarts. Subscribers wait until each source has delivered all its objects. Their tables then allow
// nothing that the objects deny.
func TestFirstStartAllowsNothingThatTheSourcesDeny(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := &writer{Rand: rand.New(rand.NewPCG(seed, 35))}
			model, dir := newModel(t), t.TempDir()
			sources := []string{source.Identity, managed.SourceKubernetes, managed.SourceFile}
			start := func() (ways, func()) {
				o, stop := runWith(t, dir, sources, func(c *Config) {
					c.Directory, c.Managers = "/etc/policies", []string{ofManagers}
				})
				return newWays(t, o), stop
			}
			listed := make(map[string][]change)
			seen := make(map[policy.Key]bool)
			for range 20 {
				ch := w.change()
				if ch.put == nil || seen[ch.key] || ch.what == cutOff ||
					by(ch.key) == byCall && ch.bad != ch.put {
					continue // callers of ReplacePolicies get an error
				}
				seen[ch.key] = true
				listed[by(ch.key)] = append(listed[by(ch.key)], ch)
				if err := model.give(ch.key, ch.put); err != nil {
					t.Fatal(err)
				}
			}
			wanted := allowed(t, model.owner)
			d, stop := start()
			complete := func(source string) error {
				var keys []policy.Key
				var text []byte
				for _, ch := range listed[source] {
					keys = append(keys, ch.key)
					d.files[ch.key] = ch.bad.Text
					text = append(append(text, "---\n"...), append(ch.bad.Text, '\n')...)
					if source != managed.SourceKubernetes {
						continue
					}
					delete(d.files, ch.key)
					if err := d.deltas.give(ch.key, ch.bad); err != nil {
						return err
					}
					if !waits(t, d.owner) && !t.Failed() {
						t.Error("subscribers do not wait although the API server has not listed everything")
					}
				}
				switch source {
				case managed.SourceKubernetes:
					d.complete(keys...)
				case managed.SourceFile:
					return d.setFiles()
				default:
					maps.DeleteFunc(d.files, func(k policy.Key, _ []byte) bool { return by(k) == byCall })
					_, err := d.owner.Replace(t.Context(), Request{
						Caller: managed.Caller{Manager: ofManagers}, Manifests: text,
					})
					return err
				}
				return nil
			}
			order := []string{managed.SourceKubernetes, managed.SourceFile, byCall}
			w.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for i, source := range order {
				if !waits(t, d.owner) {
					t.Fatalf("subscribers do not wait for %s", source)
				}
				if w.IntN(3) == 0 {
					stop()
					d, stop = start()
				}
				if err := complete(source); err != nil {
					t.Fatalf("%s: %v", source, err)
				}
				if last := i == len(order)-1; waits(t, d.owner) == last {
					t.Fatalf("subscribers wait: %t after %v: %s", !last, order[:i+1], waiting(t, d.owner))
				}
			}
			settleIn(t, d.owner, false)
			subset(t, "after the first listings", allowed(t, d.owner), wanted)
			if t.Failed() {
				for source, all := range listed {
					for _, ch := range all {
						text := strings.TrimSpace(string(ch.bad.Text))
						t.Logf("%s: %s: %.700s", source, ch.what, text)
					}
				}
			}
			stop()
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
func failChanges(t *testing.T, w *writer, c *clock, d ways, model deltas, disk *disktest.Disk) {
	t.Helper()
	forms := make(map[policy.Key]*policy.Written) // in the model
	for step := range 14 {
		ch := w.change()
		before := allowed(t, model.owner)
		if err := model.give(ch.key, ch.put); err != nil {
			t.Fatal(err)
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
		}
		err := d.give(ch.key, ch.bad)
		what := fmt.Sprintf("step %d: %s of %s is %s, full disk: %t (%v)", step, ch.key, by(ch.key), ch.what, full,
			err)
		// A call that returns an error has changed nothing. A file that cannot be read keeps its last text.
		kept := by(ch.key) == byCall && err != nil || ch.what == cutOff
		check := func(more string, asBefore bool) {
			t.Helper()
			now := allowed(t, d.owner)
			if !kept {
				subset(t, what+more, now, wanted)
			}
			if kept || asBefore {
				subset(t, what+more+", as before", now, before)
			}
		}
		check("", full || !slices.Contains([]string{"written", "removed", tooLarge}, ch.what))
		if full {
			disk.Fail(nil)
			err := d.give(ch.key, ch.bad)
			if err != nil && by(ch.key) != byCall {
				t.Fatal(err)
			}
			kept = by(ch.key) == byCall && err != nil || ch.what == cutOff
			check(", and again", false)
		}
		if err := errors.Join(
			d.deltas.Failed(t.Context(), errUnavailable), d.feed.Failed(t.Context(), errUnavailable),
		); err != nil {
			t.Fatal(err)
		}
		check(", and the sources are unreachable", false)
		if step%5 == 4 {
			var listed []policy.Key
			for k, form := range forms {
				if form != nil && k != ch.key && by(k) == managed.SourceKubernetes {
					listed = append(listed, k)
				}
			}
			if ch.put != nil && by(ch.key) == managed.SourceKubernetes {
				listed = append(listed, ch.key)
			}
			d.complete(listed...)
			settle(t, d.owner, c)
			check(", with new levels", false)
		}
		if t.Failed() {
			if ch.put != nil {
				t.Logf("%s", ch.bad.Text[:min(len(ch.bad.Text), 2000)])
			}
			return
		}
		forms[ch.key] = ch.put
		if ch.bad != ch.put { // the author corrects the object
			if err := d.give(ch.key, ch.put); err != nil {
				t.Fatal(err)
			}
			kept = false
			check(", and corrected", false)
		}
	}
}

var errUnavailable = errors.New("it is unavailable")
