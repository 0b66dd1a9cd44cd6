// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// told is a Set, with the sinks of its pods and namespaces.
type told struct {
	*Set
	pods       sink[Pod]
	namespaces sink[map[string]string]
}

func newSet(t *testing.T) told {
	t.Helper()
	filter, err := labels.NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := New("n1", "here", filter)
	pods, namespaces := s.sinks()
	return told{s, pods, namespaces}
}

func (s told) pod(name, uid string, l map[string]string) {
	s.pods.Upsert(types.NamespacedName{Namespace: "prod", Name: name}, Pod{UID: uid, ServiceAccount: "robot", Labels: l})
}

func (s told) namespace(l map[string]string) {
	s.namespaces.Upsert(types.NamespacedName{Name: "prod"}, l)
}

// Labels returns the label set of a pod, or the error for an invalid one.
func (s told) Labels(ref workload.PodReference) (label.Canonical, bool, error) {
	l, ok := s.Set.Labels(ref)
	if ok && l.Set.IsZero() {
		return l.Set, ok, errors.New("the set is empty")
	}
	return l.Set, ok, nil
}

func (s told) complete() {
	s.pods.Complete()
	s.namespaces.Complete()
}

var web0 = workload.PodReference{Namespace: "prod", Name: "web-0", UID: "u1"}

const web0Text = "k8s:app=web;k8s:io.cilium.k8s.namespace.labels.team=red;k8s:io.cilium.k8s.policy.cluster=here;" +
	"k8s:io.cilium.k8s.policy.serviceaccount=robot;k8s:io.kubernetes.pod.namespace=prod;"

// found is an answer of Find.
type found struct {
	text  string
	err   error
	after time.Duration
}

// find calls Find in the background.
func (s told) find(ctx context.Context, last string) <-chan found {
	answer, begin := make(chan found, 1), time.Now()
	go func() {
		set, err := s.Find(ctx, web0, func() (label.Canonical, bool) {
			set, err := label.Parse(last)
			return set, err == nil
		})
		answer <- found{set.Text(), err, time.Since(begin)}
	}()
	synctest.Wait()
	return answer
}

func TestPodIsFoundBeforeAndAfterTheAPIShowsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t)
		early := s.find(t.Context(), "")
		s.complete()
		s.pod("web-0", "of the pod before", map[string]string{"app": "old"})
		s.namespace(map[string]string{"team": "red"})
		time.Sleep(3 * time.Second)
		select {
		case got := <-early:
			t.Fatalf("the pod before it gives %+v", got)
		default:
		}
		s.pod("web-0", "u1", map[string]string{"app": "web", "pod-template-hash": "5d8f"})
		for what, answer := range map[string]<-chan found{"a waiting call": early, "a call afterwards": s.find(t.Context(), "")} {
			if got := <-answer; got.err != nil || got.text != web0Text {
				t.Errorf("%s: %q, %v; want %q", what, got.text, got.err, web0Text)
			}
		}
	})
}

func TestNamespaceIsWaitedForToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t)
		s.complete()
		s.pod("web-0", "u1", map[string]string{"app": "web"})
		answer := s.find(t.Context(), "")
		time.Sleep(time.Second)
		s.namespace(map[string]string{"team": "red"})
		if got := <-answer; got.text != web0Text || got.after != time.Second {
			t.Errorf("%+v, want the set after a second", got)
		}
	})
}

func TestPodThatNeverComesIsSaidInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t)
		s.complete()
		s.namespace(nil)
		s.pod("web-0", "another", nil)
		if got := <-s.find(t.Context(), web0Text); !errors.Is(got.err, ErrNotFound) || got.after != Wait {
			t.Errorf("%+v, want %v after %s", got, ErrNotFound, Wait)
		}
		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if got := <-s.find(short, ""); !errors.Is(got.err, ErrNotFound) || got.after != 5*time.Second-Margin {
			t.Errorf("%+v, want %v before the deadline", got, ErrNotFound)
		}
		gone, cancel := context.WithCancel(t.Context())
		answer := s.find(gone, "")
		cancel()
		if got := <-answer; !errors.Is(got.err, context.Canceled) {
			t.Errorf("%+v, want the caller's end", got)
		}
	})
}

func TestWithoutAPIWhatIsKnownIsTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t)
		away := errors.New("list pods: connection refused")
		starting := s.find(t.Context(), "k8s:app=held;")
		s.pods.Failed(away)
		if got := <-starting; got.err != nil || got.text != "k8s:app=held;" {
			t.Errorf("%+v, want what an endpoint of the pod holds", got)
		}
		got := <-s.find(t.Context(), "")
		if !errors.Is(got.err, ErrUnavailable) || !strings.Contains(got.err.Error(), away.Error()) {
			t.Errorf("%+v, want %v and why", got, ErrUnavailable)
		}
		// The API is available again, and then unavailable.
		answer := s.find(t.Context(), "")
		s.pod("web-0", "u1", map[string]string{"app": "web"})
		s.namespace(map[string]string{"team": "red"})
		s.complete()
		s.pods.Failed(nil)
		if got := <-answer; got.text != web0Text {
			t.Errorf("%+v, want the set", got)
		}
		s.pods.Failed(away)
		s.namespaces.Failed(away)
		if got := <-s.find(t.Context(), "k8s:app=held;"); got.err != nil || got.text != web0Text || got.after != 0 {
			t.Errorf("%+v, want the last object immediately", got)
		}
		if err := s.Problem(); err == nil {
			t.Error("the API is unavailable, and there is no problem")
		}
	})
}

func TestStaticPodIsFoundByEitherUID(t *testing.T) {
	s := newSet(t)
	s.namespace(nil)
	s.pods.Upsert(types.NamespacedName{Namespace: "prod", Name: "etcd-n1"}, trim(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		UID: "of the mirror", Annotations: map[string]string{staticUID: "of kubelet"},
	}}))
	for uid, want := range map[string]bool{"of the mirror": true, "of kubelet": true, "another": false} {
		_, ok, err := s.Labels(workload.PodReference{Namespace: "prod", Name: "etcd-n1", UID: uid})
		if ok != want || err != nil {
			t.Errorf("uid %q: %t, %v", uid, ok, err)
		}
	}
	if _, ok, _ := s.Labels(workload.PodReference{Namespace: "prod", Name: "etcd-n1"}); ok {
		t.Error("a reference without UID is of any pod")
	}
}

// TestPodCannotClaimWhatIsDerived: labels in the manifest of a pod cannot replace labels that are derived from
// Kubernetes.
func TestPodCannotClaimWhatIsDerived(t *testing.T) {
	s := newSet(t)
	s.namespace(map[string]string{"team": "red"})
	s.pod("web-0", "u1", map[string]string{
		"app": "web", label.KeyNamespace: "kube-system", label.KeyServiceAccount: "admin",
		label.KeyNamespaceLabels + "team": "blue", label.KeyCluster: "there", "io.cilium.k8s.anything": "x",
	})
	if set, ok, err := s.Labels(web0); err != nil || !ok || set.Text() != web0Text {
		t.Errorf("%s, %t, %v; want %s", set, ok, err, web0Text)
	}
}

// TestPodWhoseLabelsAreTooManyIsIsolated: the API server accepts any number of labels. A pod with too many labels
// starts, and has the identity reserved:init until it has fewer labels.
func TestPodWhoseLabelsAreTooManyIsIsolated(t *testing.T) {
	for _, n := range []int{20, 200, 253, 254, 400, 5000} {
		s := newSet(t)
		s.complete()
		namespace, labels := map[string]string{}, map[string]string{}
		for i := range n {
			of := namespace
			if i%2 == 0 {
				of = labels
			}
			of[fmt.Sprint("key-", i)] = "v"
		}
		s.namespace(namespace)
		s.pod("web-0", "u1", labels)
		l, ok := s.Set.Labels(web0)
		isolated := n+3 > label.MaxLabels
		if !ok || (l.Isolated != nil) != isolated || allocator.IsIsolated(l.Set) != isolated {
			t.Errorf("%d labels: %.60s, %t, %v", n, l.Set, ok, l.Isolated)
		}
		if l.Isolated != nil &&
			(!errors.Is(l.Isolated, label.ErrInvalid) || !strings.Contains(l.Isolated.Error(), "prod/web-0")) {
			t.Errorf("%d labels: %v; want an error about the labels of prod/web-0", n, l.Isolated)
		}
	}
}

// TestLongestKeysOfNamespacesCount: the longest key that the API server accepts for a namespace is valid together with
// the prefix for labels of namespaces.
func TestLongestKeysOfNamespacesCount(t *testing.T) {
	s := newSet(t)
	long := strings.Repeat(strings.Repeat("a", 62)+".", 4) + "b/" + strings.Repeat("c", 63)
	if len(long) != 253+1+63 {
		t.Fatalf("%d bytes", len(long))
	}
	s.namespace(map[string]string{long: strings.Repeat("v", 63)})
	s.pod("web-0", "u1", map[string]string{long: strings.Repeat("v", 63)})
	if l, ok := s.Set.Labels(web0); !ok || l.Isolated != nil || len(l.Set.All()) != 5 {
		t.Errorf("%d labels, %t, %v", len(l.Set.All()), ok, l.Isolated)
	}
}

// TestPodWithManyNamedPortsHasAnIdentity: media servers have hundreds of named ports. As many names as fit are used,
// the same names for equal pods, and the other names are reported.
func TestPodWithManyNamedPortsHasAnIdentity(t *testing.T) {
	for _, n := range []int{100, 200, 300, 1000} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "web-0", Namespace: "prod", UID: "u1", Labels: map[string]string{"app": "media"},
			},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}},
		}
		for i := range n {
			pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, corev1.ContainerPort{
				Name: fmt.Sprint("rtp-", 10_000+i), ContainerPort: int32(10_000 + i), Protocol: corev1.ProtocolUDP,
			})
		}
		var sets []string
		for range 2 {
			s := newSet(t)
			s.complete()
			s.namespace(nil)
			s.pods.Upsert(types.NamespacedName{Namespace: "prod", Name: "web-0"}, trim(pod))
			l, ok := s.Set.Labels(web0)
			ports, err := workload.NamedPortsOf(l.Set.Set())
			if !ok || l.Isolated != nil || err != nil || len(ports) == 0 || (l.Ports == nil) != (len(ports) == n) {
				t.Errorf("%d named ports: %t, %v, %v; %d are left, %v", n, ok, l.Isolated, err, len(ports), l.Ports)
			}
			sets = append(sets, l.Set.Text())
			slices.Reverse(pod.Spec.Containers[0].Ports)
		}
		if sets[0] != sets[1] {
			t.Errorf("%d named ports: equal pods have different sets", n)
		}
	}
}

// TestPodsHaveTheTenantOfTheirNamespace: a pod has the tenant of its namespace, also after the label of the namespace
// has changed.
func TestPodsHaveTheTenantOfTheirNamespace(t *testing.T) {
	s := newSet(t)
	s.pod("web-0", "u1", nil)
	for _, v := range []struct {
		labels map[string]string
		want   shares.Tenant
	}{
		{nil, shares.Namespace("prod")},
		{map[string]string{shares.DefaultTenantLabel: "shop"}, shares.Labelled("shop")},
		{map[string]string{}, shares.Namespace("prod")},
	} {
		s.namespace(v.labels)
		if l, ok := s.Set.Labels(web0); !ok || l.Tenant != v.want || s.Tenant("prod") != v.want {
			t.Errorf("labels %v: %v, %v, %t", v.labels, l.Tenant, s.Tenant("prod"), ok)
		}
	}
	s.namespace(map[string]string{shares.DefaultTenantLabel: "shop"})
	s.namespaces.Delete(types.NamespacedName{Name: "prod"})
	if got := s.Tenant("prod"); got != shares.Namespace("prod") {
		t.Errorf("a namespace that is gone is of %s", got)
	}
}

// TestAnAPIThatAnswersAgainIsNoProblem: a problem ends when the API answers again, after a failure of one kind of
// object or of both.
func TestAnAPIThatAnswersAgainIsNoProblem(t *testing.T) {
	s := newSet(t)
	s.complete()
	s.pods.Failed(errors.New("list pods: refused"))
	s.namespaces.Failed(errors.New("list namespaces: refused"))
	for _, back := range []func(error){s.pods.Failed, s.namespaces.Failed} {
		if s.Problem() == nil {
			t.Error("the API fails, and there is no problem")
		}
		back(nil)
	}
	if err := s.Problem(); err != nil {
		t.Errorf("the API answers again: %v", err)
	}
}

// TestAPodIsWaitedForWhilePodsAreListed: after a restart, Find waits until the API has sent the pod's current labels.
// It does not return the labels that an endpoint of the pod had before.
func TestAPodIsWaitedForWhilePodsAreListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t)
		s.namespace(map[string]string{"team": "red"})
		answer := s.find(t.Context(), "k8s:app=held;")
		time.Sleep(time.Second)
		synctest.Wait()
		select {
		case got := <-answer:
			t.Errorf("while pods are listed: %+v", got)
			return
		default:
		}
		s.pod("web-0", "u1", map[string]string{"app": "web"})
		if got := <-answer; got.text != web0Text || got.after != time.Second {
			t.Errorf("%+v, want what the API says", got)
		}
	})
}

func TestNamedPortsAreThoseOfContainersThatStay(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	port := func(name string, number int32, protocol corev1.Protocol) []corev1.ContainerPort {
		return []corev1.ContainerPort{{Name: name, ContainerPort: number, Protocol: protocol}}
	}
	got := trim(&corev1.Pod{Spec: corev1.PodSpec{
		Containers: []corev1.Container{
			{Ports: port("web", 80, "")},
			{Ports: port("dns", 53, corev1.ProtocolUDP)},
			{Ports: port("", 9, "")},
			{Ports: port("web", 80, corev1.ProtocolTCP)},
			{Ports: port("odd", 1, "QUIC")},
		},
		InitContainers: []corev1.Container{
			{Ports: port("sidecar", 15000, corev1.ProtocolSCTP), RestartPolicy: &always}, {Ports: port("init", 1, "")},
		},
	}}).Ports
	if want := "dns.UDP.53_sidecar.SCTP.15000_web.TCP.80"; workload.NamedPortsText(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
}
