// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystatus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// always is the Leadership of the only candidate.
type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

// same is an evaluator that returns the same outcome for every object.
type same struct {
	mu      sync.Mutex
	opinion evaluation.Outcome // guarded by mu
}

func (s *same) say(opinion evaluation.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opinion = opinion
}

func (*same) Apply(context.Context, watch.Changes[evaluation.Key, evaluation.Object]) error {
	return nil
}
func (*same) Complete(context.Context, map[evaluation.Key]struct{}) error { return nil }
func (*same) Failed(context.Context, error) error                         { return nil }
func (*same) Run(ctx context.Context, _ evaluation.Sink) error            { <-ctx.Done(); return nil }

func (*same) Tenant(namespace string) shares.Tenant          { return shares.Namespace(namespace) }
func (*same) Held(context.Context) ([]evaluation.Key, error) { return nil, nil }

func (s *same) Outcomes(_ context.Context, keys []evaluation.Key) (map[evaluation.Key]evaluation.Outcome, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[evaluation.Key]evaluation.Outcome{}
	for _, k := range keys {
		out[k] = s.opinion
	}
	return out, nil
}

// server records the writes, and answers with the error that is set for the object's name.
type server struct {
	answers map[string]error

	mu      sync.Mutex
	written []string // guarded by mu
}

// take returns the writes since the last call.
func (s *server) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	written := s.written
	s.written = nil
	return written
}

func (s *server) note(what string, o Object, more string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written = append(s.written, fmt.Sprintf("%s %s@%s%s", what, o.Name, o.ResourceVersion, more))
	return s.answers[o.Name]
}

func (s *server) SetConditions(_ context.Context, o Object, _ []byte) error {
	return s.note("status", o, "")
}

func (s *server) Record(_ context.Context, o Object, e Event) error {
	return s.note("event", o, " "+e.Reason)
}

// told returns a change of one object.
func told(kind, name, uid, version string, conditions string) watch.Changes[evaluation.Key, evaluation.Object] {
	k := evaluation.Key{Kind: kind, Namespace: "shop", Name: name}
	return watch.Changes[evaluation.Key, evaluation.Object]{Upserts: map[evaluation.Key]evaluation.Object{k: {
		Key: k, APIVersion: "v1",
		Record: &evaluation.Record{UID: uid, Generation: 1, ResourceVersion: version, Conditions: []byte(conditions)},
	}}}
}

// steps runs a writer with a server, and compares the writes after each step.
func steps(t *testing.T, opinion evaluation.Outcome, answers map[string]error,
	run func(t *testing.T, w *Writer, wrote func(...string)),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		api := &server{answers: answers}
		w := newWriter(&same{opinion: opinion}, api, always{}, slog.New(slog.DiscardHandler))
		run(t, w, func(want ...string) {
			t.Helper()
			synctest.Wait()
			if written := api.take(); !slices.Equal(written, want) {
				t.Errorf("written %q, want %q", written, want)
			}
		})
	})
}

// lead makes a writer lead until the returned function is called.
func lead(t *testing.T, w *Writer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.lead(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

func apply(t *testing.T, w *Writer, c watch.Changes[evaluation.Key, evaluation.Object]) {
	t.Helper()
	if err := w.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

const ciliumPolicy = "CiliumNetworkPolicy"

// TestOnlyALeaderWritesWhatDiffers: a process writes only while it leads, only over the version that it has seen, and
// only a status that the object does not have yet.
func TestOnlyALeaderWritesWhatDiffers(t *testing.T) {
	steps(t, evaluation.Outcome{InForce: true}, nil, func(t *testing.T, w *Writer, wrote func(...string)) {
		apply(t, w, told(ciliumPolicy, "web", "u", "7", ""))
		wrote()
		stop := lead(t, w)
		wrote("status web@7")
		said, err := merge(nil, Judge(ciliumPolicy, evaluation.Outcome{InForce: true}), 1, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		apply(t, w, told(ciliumPolicy, "web", "u", "8", string(said)))
		wrote()
		apply(t, w, told(ciliumPolicy, "web", "u", "9", "[]")) // another controller has replaced the conditions
		wrote("status web@9")
		stop()
		apply(t, w, told(ciliumPolicy, "web", "u", "10", ""))
		wrote()
		stop = lead(t, w)
		wrote("status web@10")
		k := evaluation.Key{Kind: ciliumPolicy, Namespace: "shop", Name: "web"}
		apply(t, w, watch.Changes[evaluation.Key, evaluation.Object]{Deletes: map[evaluation.Key]struct{}{k: {}}})
		time.Sleep(2 * refusedIn)
		wrote()
		stop()
	})
}

// TestEventsAreMadeOncePerObject: a refusal causes one Event per object, and an accepted policy causes none.
func TestEventsAreMadeOncePerObject(t *testing.T) {
	const kind = withoutStatus
	steps(t, evaluation.Outcome{Refused: "it has no capacity"}, nil, func(t *testing.T, w *Writer, wrote func(...string)) {
		stop := lead(t, w)
		apply(t, w, told(kind, "web", "u", "7", ""))
		wrote("event web@7 PolicyRefused")
		apply(t, w, told(kind, "web", "u", "8", ""))
		wrote()
		apply(t, w, told(kind, "web", "another", "9", ""))
		wrote("event web@9 PolicyRefused")
		w.evaluator.(*same).say(evaluation.Outcome{InForce: true})
		apply(t, w, told(kind, "web", "another", "10", ""))
		wrote("event web@10 PolicyAccepted")
		apply(t, w, told(kind, "web", "third", "11", ""))
		wrote()
		stop()
	})
}

// TestAnswersAreTriedAgainWhenThatHelps: an error for one object does not delay other objects. The request is retried
// only when it may succeed.
func TestAnswersAreTriedAgainWhenThatHelps(t *testing.T) {
	for what, c := range map[string]struct {
		answer error
		again  time.Duration // 0: no retry without a change
		other  bool          // the other object is still written
	}{
		"a newer form":   {ErrChanged, subject.FirstPause, true},
		"gone":           {ErrGone, 0, true},
		"refused":        {ErrRefused, refusedIn, true},
		"without status": {ErrNoStatus, refusedIn, false}, // applies to the whole kind
		"no answer":      {errors.New("connection refused"), subject.FirstPause, false},
	} {
		t.Run(what, func(t *testing.T) {
			answers := map[string]error{"a": c.answer}
			steps(t, evaluation.Outcome{InForce: true}, answers, func(t *testing.T, w *Writer, wrote func(...string)) {
				apply(t, w, told(ciliumPolicy, "a", "u", "1", ""))
				apply(t, w, told(ciliumPolicy, "b", "u", "1", ""))
				stop := lead(t, w)
				first := []string{"status a@1"}
				if c.other {
					first = append(first, "status b@1")
				}
				wrote(first...)
				if c.again == 0 {
					time.Sleep(2 * refusedIn)
					wrote()
					stop()
					return
				}
				time.Sleep(c.again - time.Millisecond)
				wrote()
				time.Sleep(2 * time.Millisecond)
				wrote("status a@1")
				stop()
			})
		})
	}
}

// each is an evaluator with a separate outcome for each object. Like the owner of policies, it removes unlisted
// objects on Complete.
type each struct {
	same
	opinions map[string]evaluation.Outcome // by name; guarded by mu
	listed   int
}

func (e *each) Outcomes(_ context.Context, keys []evaluation.Key) (map[evaluation.Key]evaluation.Outcome, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[evaluation.Key]evaluation.Outcome{}
	for _, k := range keys {
		out[k] = e.opinions[k.Name]
	}
	return out, nil
}

func (e *each) Complete(_ context.Context, listed map[evaluation.Key]struct{}) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.listed = len(listed)
	return nil
}

// TestRefusedObjectsAreJudgedAgainWhenRoomComes changes the shares: an object that exceeded its share now fits, and
// another object exceeds its share. The status of an object with an unchanged verdict is not written.
func TestRefusedObjectsAreJudgedAgainWhenRoomComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused, inForce := evaluation.Outcome{Refused: "no capacity"}, evaluation.Outcome{InForce: true}
		o := &each{opinions: map[string]evaluation.Outcome{"a": refused, "b": inForce, "c": refused}}
		api := &server{}
		w := newWriter(o, api, always{}, slog.New(slog.DiscardHandler))
		for _, name := range []string{"a", "b", "c"} {
			apply(t, w, told(ciliumPolicy, name, name, "1", ""))
		}
		stop := lead(t, w)
		defer stop()
		synctest.Wait()
		api.take()
		o.mu.Lock()
		o.opinions["a"], o.opinions["b"] = inForce, refused
		o.mu.Unlock()
		apply(t, w, watch.Changes[evaluation.Key, evaluation.Object]{})
		synctest.Wait()
		time.Sleep(time.Hour)
		synctest.Wait()
		written := api.take()
		slices.Sort(written)
		if !slices.Equal(written, []string{"status a@1", "status b@1"}) {
			t.Errorf("written %q, want the status of a and b, whose verdict changed, but not of c", written)
		}
	})
}

// TestChangedDNSRuleJudgesPoliciesWithNames: when a DNS rule changes, policies with DNS names are evaluated again,
// because their note about a missing DNS rule depends on it.
func TestChangedDNSRuleJudgesPoliciesWithNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var missing evaluation.Notes
		missing.Add(evaluation.NoteNoDNSRule, "spec.egress[0].toFQDNs", "no DNS rule selects these pods")
		without := evaluation.Outcome{InForce: true, UsesNames: true, Notes: missing}
		with := evaluation.Outcome{InForce: true, UsesNames: true}
		dns, other := evaluation.Outcome{InForce: true, HasDNSRule: true}, evaluation.Outcome{InForce: true}
		o := &each{opinions: map[string]evaluation.Outcome{"names": without, "other": other}}
		api := &server{}
		w := newWriter(o, api, always{}, slog.New(slog.DiscardHandler))
		defer lead(t, w)()
		change := func(name string, outcomes map[string]evaluation.Outcome, want ...string) {
			t.Helper()
			o.mu.Lock()
			o.opinions = outcomes
			o.mu.Unlock()
			apply(t, w, told(ciliumPolicy, name, name, "1", ""))
			synctest.Wait()
			written := api.take()
			slices.Sort(written)
			if !slices.Equal(written, want) {
				t.Errorf("after a change of %s: written %q, want %q", name, written, want)
			}
		}
		outcomes := func(names, dns evaluation.Outcome) map[string]evaluation.Outcome {
			return map[string]evaluation.Outcome{"names": names, "dns": dns, "other": other}
		}
		change("other", outcomes(without, other), "status other@1")
		change("names", outcomes(without, other), "status names@1")
		change("dns", outcomes(with, dns), "status dns@1", "status names@1")
		change("dns", outcomes(without, other), "status dns@1", "status names@1")
		change("other", outcomes(with, other), "status other@1") // the policy names is not evaluated again
	})
}

// TestObjectsThatAListingLacksAreForgotten: after a listing, the Writer forgets the objects that are not in it, and
// keeps the listed objects.
func TestObjectsThatAListingLacksAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &each{opinions: map[string]evaluation.Outcome{"kept": {InForce: true}, "gone": {InForce: true}}}
		api := &server{}
		w := newWriter(o, api, always{}, slog.New(slog.DiscardHandler))
		for _, name := range []string{"kept", "gone"} {
			apply(t, w, told(ciliumPolicy, name, name, "1", ""))
		}
		kept := evaluation.Key{Kind: ciliumPolicy, Namespace: "shop", Name: "kept"}
		if err := w.Complete(t.Context(), map[evaluation.Key]struct{}{kept: {}}); err != nil || o.listed != 1 {
			t.Fatalf("%v, %d listed", err, o.listed)
		}
		defer lead(t, w)()
		synctest.Wait()
		if written := api.take(); !slices.Equal(written, []string{"status kept@1"}) {
			t.Errorf("written %q, want only the listed object", written)
		}
	})
}

// TestPolicyThatSomeNodesDoNotEnforceIsSaid: some nodes do not enforce a policy. The condition stays true and names
// the nodes, and for a NetworkPolicy the author gets an Event.
func TestPolicyThatSomeNodesDoNotEnforceIsSaid(t *testing.T) {
	key := func(kind string) evaluation.Key { return evaluation.Key{Kind: kind, Namespace: "shop", Name: "web"} }
	n := Nodes{Names: "node-7", Count: 1, All: 5000, Reason: "ingress of identity 301: rules of 1 policies are left out"}
	steps(t, evaluation.Outcome{InForce: true}, nil, func(t *testing.T, w *Writer, wrote func(...string)) {
		stop := lead(t, w)
		defer stop()
		apply(t, w, told(ciliumPolicy, "web", "u", "7", ""))
		apply(t, w, told(withoutStatus, "web", "v", "8", ""))
		wrote("status web@7")
		w.SetRefused(map[evaluation.Key]Nodes{key(ciliumPolicy): n, key(withoutStatus): n}, Nodes{All: 5000})
		wrote("status web@7", "event web@8 PolicyEnforcedPartly")
		const message = "enforced on 4999 of 5000 nodes; on the others (node-7) what does not fit is closed: "
		if v := w.objects[key(ciliumPolicy)].verdict; v.Reason != Accepted || v.status() != "True" ||
			!strings.HasPrefix(v.Message, message+n.Reason) {
			t.Errorf("%+v", v)
		}
		w.SetRefused(nil, Nodes{All: 5000})
		wrote("status web@7", "event web@8 PolicyAccepted")
		// The reports of two nodes omit policies, so a policy that they do not report is not described as enforced
		// there.
		w.SetRefused(nil, Nodes{All: 5000, Unknown: "n1, n2", UnknownCount: 2, Omitted: 256})
		wrote("status web@7", "event web@8 PolicyEnforcedPartly")
		const unknown = "enforced on 4998 of 5000 nodes; unknown on 2 nodes (n1, n2): at least 256 policies "
		if v := w.objects[key(ciliumPolicy)].verdict; v.Reason != Accepted || !strings.HasPrefix(v.Message, unknown) {
			t.Errorf("%+v", v)
		}
		n.Unknown, n.UnknownCount, n.Omitted, n.Reasons = "n1, n2", 2, 256, "TableTooLarge 128, NotStored 64"
		w.SetRefused(map[evaluation.Key]Nodes{key(ciliumPolicy): n}, Nodes{})
		wrote("status web@7", "event web@8 PolicyAccepted")
		const both = "enforced on 4997 of 5000 nodes; on 1 node (node-7) what does not fit is closed: "
		if v := w.objects[key(ciliumPolicy)].verdict; !strings.HasPrefix(v.Message, both) ||
			!strings.Contains(v.Message, "; unknown on 2 nodes (n1, n2): at least 256 policies that are not enforced as "+
				"written (at least TableTooLarge 128, NotStored 64) do not fit") {
			t.Errorf("%+v", v)
		}
		w.SetRefused(nil, Nodes{All: 5000, Unreadable: "n3", UnreadableCount: 1})
		wrote("status web@7", "event web@8 PolicyEnforcedPartly")
		const unreadable = "enforced on 4999 of 5000 nodes; unknown on 1 node (n3): the reports of these nodes in etcd "
		if v := w.objects[key(ciliumPolicy)].verdict; v.Reason != Accepted || !strings.HasPrefix(v.Message, unreadable) {
			t.Errorf("%+v", v)
		}
	})
	// A change of the outcome and a change of the refusing nodes are each reported without the other.
	exceeds := evaluation.Outcome{InForce: true, Exceeds: "exceeds the share"}
	steps(t, exceeds, nil, func(t *testing.T, w *Writer, wrote func(...string)) {
		stop := lead(t, w)
		defer stop()
		apply(t, w, told(ciliumPolicy, "web", "u", "7", ""))
		wrote("event web@7 ExceedsShare", "status web@7")
		w.SetRefused(map[evaluation.Key]Nodes{key(ciliumPolicy): n}, Nodes{}) // nodes isolate these pods anyway
		wrote()
	})
}

// TestNewLeaderAsksKindsWithoutAStatusAgain: a kind had no status on the API server while the previous leader led.
// The new leader tries the kind again.
func TestNewLeaderAsksKindsWithoutAStatusAgain(t *testing.T) {
	answers := map[string]error{"a": ErrNoStatus}
	steps(t, evaluation.Outcome{InForce: true}, answers, func(t *testing.T, w *Writer, wrote func(...string)) {
		apply(t, w, told(ciliumPolicy, "a", "u", "1", ""))
		stop := lead(t, w)
		wrote("status a@1")
		stop()
		stop = lead(t, w)
		wrote("status a@1")
		stop()
	})
}

// TestPoliciesOfOneTenantDelayNoStatusOfAnother: 1,000 policies of one namespace are due, and later a policy of
// another namespace. The later policy does not wait for all the others.
func TestPoliciesOfOneTenantDelayNoStatusOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &limited{tokens: make(chan struct{})}
		w := newWriter(&same{opinion: evaluation.Outcome{InForce: true}}, api, always{}, slog.New(slog.DiscardHandler))
		flood := watch.Changes[evaluation.Key, evaluation.Object]{Upserts: map[evaluation.Key]evaluation.Object{}}
		for i := range 1000 {
			k := evaluation.Key{Kind: ciliumPolicy, Namespace: "a", Name: fmt.Sprintf("p%03d", i)}
			flood.Upserts[k] = evaluation.Object{
				Key: k, APIVersion: "v1", Record: &evaluation.Record{UID: k.Name, Generation: 1, ResourceVersion: "1"},
			}
		}
		apply(t, w, flood)
		defer lead(t, w)()
		for range 30 {
			api.tokens <- struct{}{}
		}
		synctest.Wait()
		api.take()
		apply(t, w, told(ciliumPolicy, "web", "u", "7", "")) // in the namespace shop
		for range 2 * subject.MaxBatch {
			api.tokens <- struct{}{}
			// The policies of the other tenant become due continually.
			apply(t, w, flood)
		}
		synctest.Wait()
		at := slices.Index(api.take(), "status web@7")
		if at < 0 || at > subject.MaxBatch {
			t.Errorf("the status was request %d, want it among the first %d", at, subject.MaxBatch)
		}
		// Within a tenant, the policy that has waited longest comes first. So every policy gets its status.
		close(api.tokens)
		synctest.Wait()
		if n := w.Status().Pending; n > 0 {
			t.Errorf("%d policies wait", n)
		}
	})
}

// limited is a server that lets one request pass for each token.
type limited struct {
	server
	tokens chan struct{}
}

func (l *limited) SetConditions(ctx context.Context, o Object, conditions []byte) error {
	<-l.tokens
	return l.server.SetConditions(ctx, o, conditions)
}
