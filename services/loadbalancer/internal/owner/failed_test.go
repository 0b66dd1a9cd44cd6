// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// sourceOf returns the source of an object, which its name determines.
func sourceOf(k service.ObjectKey) string {
	name := strings.TrimSuffix(k.Name.Name, "-x")
	return map[string]string{"s0": managed.SourceKubernetes, "s1": managed.SourceFile}[name]
}

// ways delivers objects to an owner from three sources.
type ways struct {
	*running
	objects *Objects
	feed    *Feed
	files   map[service.ObjectKey]string
}

// newWays returns the sources of an owner, after their first listing.
func newWays(o *running) *ways {
	o.t.Helper()
	x := &ways{
		o, o.Objects(managed.SourceKubernetes), o.Feed(managed.SourceFile), make(map[service.ObjectKey]string),
	}
	if err := errors.Join(x.objects.Complete(o.t.Context(), nil), x.feed.Set(o.t.Context(), nil),
		o.computeLevels(o.t.Context())); err != nil {
		o.t.Fatal(err)
	}
	return x
}

// give delivers the text of an object through the object's source; an empty text removes the object.
func (x *ways) give(k service.ObjectKey, text string, bad error) error {
	switch sourceOf(k) {
	case managed.SourceKubernetes:
		c := watch.Changes[service.ObjectKey, Given]{Upserts: map[service.ObjectKey]Given{k: {Err: bad}}}
		switch {
		case bad != nil:
		case text == "":
			c = watch.Changes[service.ObjectKey, Given]{Deletes: map[service.ObjectKey]struct{}{k: {}}}
		default:
			c.Upserts = givenOf(x.t, text)
		}
		return x.objects.Apply(x.t.Context(), c)
	case managed.SourceFile:
		if delete(x.files, k); text != "" {
			x.files[k] = text
		}
		var files []directory.File
		for _, k := range slices.SortedFunc(maps.Keys(x.files), service.ObjectKey.Compare) {
			origin := strings.ReplaceAll(fmt.Sprint(k), "/", "-") + ".yaml"
			files = append(files, directory.File{Origin: origin, Data: []byte(x.files[k])})
		}
		return x.feed.Set(x.t.Context(), files)
	}
	var err error
	if text != "" {
		_, err = x.Upsert(x.t.Context(), Request{Manifests: []byte(text)})
	} else {
		_, err = x.Delete(x.t.Context(), managed.Caller{}, []service.ObjectKey{k})
	}
	return err
}

// served returns each frontend with each of its backends.
func (r *running) served() map[string]bool {
	r.t.Helper()
	out := make(map[string]bool)
	for k, text := range r.allFrontends() {
		for _, word := range strings.Fields(text)[1:] {
			if backend, err := netip.ParseAddrPort(strings.Trim(word, ",;")); err == nil {
				out[fmt.Sprint(k.Addr, " ", k.Port, " -> ", backend)] = true
			}
		}
	}
	return out
}

// TestFailedChangeOfAServiceUsesNoOtherBackend makes changes of Services and slices from an API server, files and
// calls fail in every possible way. Until a change succeeds, connections reach only backends that they reached before
// and that the desired objects have, too.
func TestFailedChangeOfAServiceUsesNoOtherBackend(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 34))
			config := testConfig(&clock{now: time.Unix(1e9, 0)})
			sources := []string{managed.SourceKubernetes, managed.SourceFile}
			model := newWays(start(t, config, t.TempDir(), sources...))
			config = testConfig(&clock{now: time.Unix(1e9, 0)})
			config.Limits = Limits{Services: 100, Slices: 100, Frontends: 24, Backends: 60, BackendsPerService: 30}
			dir := t.TempDir()
			x := newWays(start(t, config, dir, sources...))
			used := 0
			for step := range 30 {
				used += failService(t, random, step, x, model)
				if t.Failed() {
					return
				}
			}
			if used < 5 {
				t.Errorf("backends were used after %d of 30 changes only", used)
			}
			last := x.served()
			x.stop()
			missing(t, "after a restart", start(t, config, dir, sources...).served(), last)
		})
	}
}

// failService makes a change that may fail, and compares with the model. It returns 1 if any backend is in use
// afterwards.
func failService(t *testing.T, random *rand.Rand, step int, x, model *ways) int {
	t.Helper()
	n := random.IntN(6)
	namespace, name := []string{"shop", "evil"}[n/3], fmt.Sprint("s", n%3)
	ip := fmt.Sprintf("10.96.0.%d", 1+n)
	k, text := keyOf(service.KindService, namespace, name), serviceText(namespace, name, ip, 1+random.IntN(3))
	if random.IntN(2) == 0 {
		k = keyOf(service.KindSlice, namespace, name+"-x")
		var addresses []string
		for range random.IntN(5) {
			addresses = append(addresses, fmt.Sprintf("10.244.%d.%d", n, 1+random.IntN(9)))
		}
		text = sliceText(namespace, name, 3, slices.Compact(slices.Sorted(slices.Values(addresses)))...)
	}
	what, good, bad, kept := "written", text, error(nil), false
	switch source := sourceOf(k); random.IntN(6) {
	case 0:
		what, good, text = "removed", "", ""
	case 1:
		what = "not readable"
		if source == managed.SourceKubernetes {
			bad = errors.New("spec: must be an object")
		}
		indent := map[service.Kind]string{service.KindService: "  "}[k.Kind]
		text = strings.Replace(text, "ports:\n", "ports: 7\n"+indent+"other:\n", 1)
	case 2:
		if source == managed.SourceFile {
			// Not even the name of the object can be read, so its last text stays.
			what, text, kept = "cut off", text[:strings.Index(text, "name:")]+"[", true
		}
	case 3:
		if k.Kind == service.KindService {
			what = "larger than the share"
			text = serviceText(namespace, name, ip, 22)
			good = text
		}
	}
	source := sourceOf(k)
	before := model.served()
	if err := model.give(k, good, nil); err != nil {
		t.Fatal(err)
	}
	wanted := model.served()
	err := x.give(k, text, bad)
	if source == "" && err != nil {
		kept = true // the caller knows that nothing has changed
	}
	what = fmt.Sprintf("step %d: %v by %q is %s (%v)", step, k, source, what, err)
	now := x.served()
	if !kept {
		missing(t, what, now, wanted)
	}
	if kept || good != text || bad != nil {
		missing(t, what+", as before", now, before)
	}
	if good != text || bad != nil || kept { // the author corrects the object
		if err := x.give(k, good, nil); err != nil {
			if source != "" {
				t.Fatalf("%s: %v", what, err)
			}
			if err := model.give(k, "", nil); err != nil {
				t.Fatal(err)
			}
			if err := x.give(k, "", nil); err != nil {
				t.Fatal(err)
			}
		}
		missing(t, what+", and corrected", x.served(), model.served())
	}
	if step%5 == 4 {
		if err := x.computeLevels(t.Context()); err != nil {
			t.Fatal(err)
		}
		missing(t, what+", with new levels", x.served(), model.served())
	}
	return min(1, len(now))
}

// missing reports what is in a and not in b.
func missing(t *testing.T, what string, a, b map[string]bool) {
	t.Helper()
	for pair := range a {
		if !b[pair] {
			t.Errorf("%s: %s is served", what, pair)
		}
	}
}
