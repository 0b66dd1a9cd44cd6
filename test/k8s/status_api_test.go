// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Sluice's condition, and the lease of the tests.
const (
	accepted     = "sluice.io/Accepted"
	system       = "sluice-system"
	leases       = "/apis/coordination.k8s.io/v1/namespaces/" + system + "/leases/sluice-status"
	cidrGroups   = "/apis/cilium.io/v2/ciliumcidrgroups"
	adminVersion = "policy.networking.k8s.io/v1alpha1"
	adminPolicy  = "/apis/" + adminVersion + "/adminnetworkpolicies"
)

// statusAPI is an API with the account of the writer, which has the rights in deploy/kubernetes/base.
type statusAPI struct {
	*apiServer
	token string // file
}

func newStatusAPI(t *testing.T) *statusAPI {
	t.Helper()
	api := newAPI(t)
	api.shop()
	return statusAPIOf(t, api)
}

// statusAPIOf creates the account of the writer in an API.
func statusAPIOf(t *testing.T, api *apiServer) *statusAPI {
	t.Helper()
	a := &statusAPI{apiServer: api}
	a.crds()
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": system}})
	for _, file := range []string{"serviceaccount", "clusterrole", "clusterrolebinding", "role", "rolebinding"} {
		a.kubectl("create", "-f", "../../deploy/kubernetes/base/status-"+file+".yaml")
	}
	a.token = filepath.Join(a.dir, "status-token")
	secret := strings.TrimSpace(a.kubectl("create", "token", "-n", system, "sluice-status"))
	if err := os.WriteFile(a.token, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

// writer is a process that writes the status while it is elected.
type writer struct {
	*policyNode
	process *exec.Cmd
	ended   chan error
}

func (a *statusAPI) writer(flags ...string) *writer {
	a.t.Helper()
	return a.writerIn(shortDir(a.t), flags...)
}

// shortDir returns a directory with a short path, for sockets.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-status")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// writerIn starts a writer with its state in dir.
func (a *statusAPI) writerIn(dir string, flags ...string) *writer {
	a.t.Helper()
	w := &writer{policyNode: &policyNode{t: a.t, dir: dir}}
	w.process, w.ended = w.run("controller", append([]string{
		"--kubernetes-api=" + a.ready.Server, "--kubernetes-token=" + a.token,
		"--kubernetes-ca=" + filepath.Join(a.dir, "ca.crt"),
	}, flags...)...)
	a.t.Cleanup(func() {
		if w.process.ProcessState == nil {
			w.end(syscall.SIGTERM)
		}
	})
	return w
}

func (w *writer) end(signal syscall.Signal) {
	w.t.Helper()
	if err := w.process.Process.Signal(signal); err != nil {
		w.t.Fatal(err)
	}
	if err := <-w.ended; err != nil && signal == syscall.SIGTERM {
		w.t.Errorf("the end of the writer: %s", err)
	}
}

// election returns the process's report of the election.
func (w *writer) election() *controllerv1.Election {
	w.t.Helper()
	r, err := controllerv1.NewControllerServiceClient(w.dial("controller")).
		GetStatus(w.t.Context(), &controllerv1.GetStatusRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return r.GetElection()
}

// said counts the lines of the writer's log that contain a text.
func (w *writer) said(text string) int {
	w.t.Helper()
	content, err := os.ReadFile(filepath.Join(w.dir, "controller.log"))
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Count(string(content), text)
}

type condition struct {
	Type, Status, Reason, Message, LastTransitionTime string
	ObservedGeneration                                int64
}

type withStatus struct {
	Metadata struct {
		Generation      int64
		ResourceVersion string
	}
	Status struct{ Conditions []condition }
}

func (a *statusAPI) get(path string) (o withStatus) {
	a.t.Helper()
	if err := json.Unmarshal(a.do(http.MethodGet, path, nil), &o); err != nil {
		a.t.Fatal(err)
	}
	return o
}

// says waits until the object has the condition for its generation.
func (a *statusAPI) says(path, status, reason string, message ...string) condition {
	a.t.Helper()
	var c condition
	eventually(a.t, path+" is "+reason, func() error {
		o := a.get(path)
		i := slices.IndexFunc(o.Status.Conditions, func(c condition) bool { return c.Type == accepted })
		if i < 0 {
			return fmt.Errorf("the conditions are %+v", o.Status.Conditions)
		}
		c = o.Status.Conditions[i]
		wrong := c.Status != status || c.Reason != reason || c.ObservedGeneration != o.Metadata.Generation ||
			c.LastTransitionTime == ""
		for _, m := range message {
			wrong = wrong || !strings.Contains(c.Message, m)
		}
		if wrong {
			return fmt.Errorf("generation %d: the condition is %+v, want %s, %s and %q",
				o.Metadata.Generation, c, status, reason, message)
		}
		return nil
	})
	return c
}

// patches counts the requests that wrote a status, or anything else, of a resource.
func (a *statusAPI) patches(resource string) (n int) {
	a.t.Helper()
	return a.requestsOf(resource, `verb="PATCH"`) + a.requestsOf(resource, `verb="APPLY"`)
}

// requestsOf counts the requests for a resource with all these labels.
func (a *statusAPI) requestsOf(resource string, labels ...string) (n int) {
	a.t.Helper()
	labels = append(labels, `resource="`+resource+`"`)
	for line := range strings.Lines(string(a.do(http.MethodGet, "/metrics", nil))) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "apiserver_request_total{") ||
			slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(line, l) }) {
			continue
		}
		value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if err != nil {
			a.t.Fatal(err)
		}
		n += int(value)
	}
	return n
}

// Specs of a CiliumNetworkPolicy: one that is enforced, one with an unsupported field, and one with a field that does
// not exist in any version.
const (
	plain   = `{"endpointSelector":{},"ingress":[{"fromEntities":["world"]}]}`
	mutual  = `{"endpointSelector":{},"ingress":[{"fromEntities":["world"],"authentication":{"mode":"required"}}]}`
	unknown = `{"endpointSelector":{},"ingress":[{"fromEntities":["world"],"unlessOn":["sunday"]}]}`
)

func cnp(name, spec string) object {
	return manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", name, spec)
}

func TestAPIStatusSaysWhatBecomesOfEachKind(t *testing.T) {
	a := newStatusAPI(t)
	a.crdWithStatus("AdminNetworkPolicy", "adminnetworkpolicies", "policy.networking.k8s.io", "Cluster", "v1alpha1")
	a.writer()
	a.do(http.MethodPost, cilium, cnp("plain", plain))
	a.do(http.MethodPost, cilium, cnp("mutual", mutual))
	a.do(http.MethodPost, cilium, cnp("unknown", unknown))
	a.do(http.MethodPost, clusterwide,
		manifest("cilium.io/v2", "CiliumClusterwideNetworkPolicy", "", "c", unknown))
	for name, prefix := range map[string]string{"good": "192.0.2.0/24", "bad": "192.0.2.0/64"} {
		spec := fmt.Sprintf(`{"externalCIDRs":[%q]}`, prefix)
		a.do(http.MethodPost, cidrGroups, manifest("cilium.io/v2", "CiliumCIDRGroup", "", name, spec))
	}
	a.do(http.MethodPost, adminPolicy, manifest(adminVersion, "AdminNetworkPolicy", "", "a",
		`{"priority":1,"subject":{"namespaces":{}},"egress":[{"action":"Deny","to":[{"namespaces":{}}],"ports":7}]}`))
	a.says(cilium+"/plain", "True", "Accepted", "enforced as written")
	a.says(cilium+"/mutual", "True", "ConvertedToClosed",
		"spec.ingress[0].authentication: not supported by Sluice: mutual authentication; the rule allows nothing")
	refusal := a.says(cilium+"/unknown", "False", "Refused",
		"what it selects is isolated", "spec.ingress[0].unlessOn: no such field")
	a.says(clusterwide+"/c", "False", "Refused", "spec.ingress[0].unlessOn: no such field")
	a.says(cidrGroups+"/good", "True", "Accepted")
	a.says(cidrGroups+"/bad", "False", "Refused", "spec.externalCIDRs[0]")
	a.says(adminPolicy+"/a", "False", "Refused", "spec.egress[0].ports")

	// The text equals the output of `sluice policy list` on a node.
	n := newPolicyNode(t, a.apiServer)
	var text string
	eventually(t, "a node has the policy", func() error {
		_, listed := n.list()
		if text = listed["CiliumNetworkPolicy shop/unknown"].GetError(); text == "" {
			return errors.New("the policy is not listed, or has no error")
		}
		return nil
	})
	if !strings.Contains(refusal.Message, text) {
		t.Errorf("the condition says %q, the list %q", refusal.Message, text)
	}

	// A correction has another generation and another result.
	a.do(http.MethodPatch, cilium+"/unknown",
		object{"spec": object{"ingress": []object{{"fromEntities": []string{"world"}}}}})
	a.says(cilium+"/unknown", "True", "Accepted")
	t.Logf("\n%s", a.kubectl("get", "cnp,ccnp,ccg", "-A"))
	t.Logf("\n%s", a.kubectl("describe", "cnp", "-n", "shop", "mutual"))
}

func TestAPIStatusKeepsTheConditionsOfOthersAndIsWrittenOnce(t *testing.T) {
	a := newStatusAPI(t)
	a.do(http.MethodPost, cilium, cnp("p", unknown))
	others := []object{
		{
			"type": "Valid", "status": "True", "message": "Policy validation succeeded",
			"lastTransitionTime": "2026-01-01T00:00:00Z", "more": 1,
		},
		{"type": "example.com/Reviewed", "status": "Unknown"},
	}
	a.do(http.MethodPatch, cilium+"/p/status",
		object{"status": object{"conditions": others, "derivativePolicies": object{"x": 1}}})
	w := a.writer()
	first := a.says(cilium+"/p", "False", "Refused")
	look := func(what string) {
		t.Helper()
		var o struct {
			Status struct {
				Conditions         []object
				DerivativePolicies object
			}
		}
		if err := json.Unmarshal(a.do(http.MethodGet, cilium+"/p", nil), &o); err != nil {
			t.Fatal(err)
		}
		if got, want := fmt.Sprint(o.Status.Conditions[:2]), fmt.Sprint(others); got != want ||
			len(o.Status.Conditions) != 3 || len(o.Status.DerivativePolicies) != 1 {
			t.Errorf("%s: the status is %v, want %v kept", what, o.Status, want)
		}
	}
	look("the first write")

	// Another generation with the same result is no transition.
	labelled := a.patches("ciliumnetworkpolicies")
	a.do(http.MethodPatch, cilium+"/p", object{"spec": object{"description": "again"}})
	if again := a.says(cilium+"/p", "False", "Refused"); again.LastTransitionTime != first.LastTransitionTime {
		t.Errorf("the transition was at %s, and is at %s", first.LastTransitionTime, again.LastTransitionTime)
	}
	look("the second write")
	if n := a.patches("ciliumnetworkpolicies") - labelled; n != 2 { // the test's own, and the writer's
		t.Errorf("%d patches for a new generation, want 2", n)
	}

	// A deleted condition is written again. A restart writes nothing.
	a.do(http.MethodPatch, cilium+"/p/status", object{"status": object{"conditions": others}})
	a.says(cilium+"/p", "False", "Refused")
	w.end(syscall.SIGTERM)
	before := a.patches("ciliumnetworkpolicies")
	second := a.writer()
	a.do(http.MethodPost, cilium, cnp("last", plain))
	a.says(cilium+"/last", "True", "Accepted") // checked after p
	if n := a.patches("ciliumnetworkpolicies") - before; n != 1 {
		t.Errorf("%d patches after a restart, want one, of what is new", n)
	}
	if n := second.said("elected"); n != 1 {
		t.Errorf("elected %d times", n)
	}
}

func TestAPIStatusWriterIsElected(t *testing.T) {
	a := newStatusAPI(t)
	writers := []*writer{a.writer(), a.writer()}
	var lead int
	eventually(t, "one leads", func() error {
		for i, w := range writers {
			if w.said("elected") == 1 {
				lead = i
				return nil
			}
		}
		return errors.New("none is elected")
	})
	a.do(http.MethodPost, cilium, cnp("p", plain))
	a.says(cilium+"/p", "True", "Accepted")
	if n := writers[1-lead].said("elected"); n != 0 {
		t.Fatal("both lead")
	}
	leader := writers[lead].election()
	if !leader.GetLeading() || leader.GetHolder() != leader.GetIdentity() || leader.GetError() != "" {
		t.Errorf("the leader says %v", leader)
	}
	eventually(t, "the other names the leader", func() error {
		if e := writers[1-lead].election(); e.GetLeading() || e.GetHolder() != leader.GetIdentity() {
			return fmt.Errorf("it says %v", e)
		}
		return nil
	})
	before := a.patches("ciliumnetworkpolicies")
	writers[lead].end(syscall.SIGKILL)
	a.do(http.MethodPost, cilium, cnp("q", unknown))
	a.says(cilium+"/q", "False", "Refused")
	if n := writers[1-lead].said("elected"); n != 1 {
		t.Errorf("the other was elected %d times", n)
	}
	if n := a.patches("ciliumnetworkpolicies") - before; n != 1 {
		t.Errorf("%d patches by the new leader, want one", n)
	}

	// When the lease belongs to another process, the writer stops writing.
	a.do(http.MethodPatch, leases,
		object{"spec": object{"holderIdentity": "another", "renewTime": "2036-01-01T00:00:00.000000Z"}})
	eventually(t, "the lease is lost", func() error {
		if writers[1-lead].said("another process has the lease") == 0 {
			return errors.New("it leads")
		}
		return nil
	})
	before = a.patches("ciliumnetworkpolicies")
	a.do(http.MethodPost, cilium, cnp("r", unknown))
	a.do(http.MethodPatch, leases, object{"spec": object{"holderIdentity": ""}})
	a.says(cilium+"/r", "False", "Refused")
	if n := writers[1-lead].said(`elected`); n != 2 {
		t.Errorf("the writer was elected %d times", n)
	}
	if n := a.patches("ciliumnetworkpolicies") - before; n != 1 {
		t.Errorf("%d patches, want one", n)
	}

	// A released lease is acquired at once. An outage of the API does not end the leadership.
	a.ask("kill")
	a.ask("start")
	a.do(http.MethodPatch, cilium+"/r", object{"spec": object{"ingress": []object{{}}}})
	a.says(cilium+"/r", "True", "Accepted")
	writers[1-lead].end(syscall.SIGTERM)
	var lease struct {
		Spec struct{ HolderIdentity string }
	}
	if err := json.Unmarshal(a.do(http.MethodGet, leases, nil), &lease); err != nil || lease.Spec.HolderIdentity != "" {
		t.Errorf("the lease of a writer that has ended is %+v: %v", lease, err)
	}
}

// eventsOf returns the Events about a NetworkPolicy in shop, as TYPE REASON NOTE.
func (a *statusAPI) eventsOf(name string) (out []string) {
	a.t.Helper()
	var all struct {
		Items []struct {
			Type, Reason, Note, ReportingController string
			Regarding                               struct{ Kind, Name string }
		}
	}
	if err := json.Unmarshal(a.do(http.MethodGet, shopEvents, nil), &all); err != nil {
		a.t.Fatal(err)
	}
	for _, e := range all.Items {
		if e.Regarding.Kind == "NetworkPolicy" && e.Regarding.Name == name && e.ReportingController == "sluice.io/status" {
			out = append(out, e.Type+" "+e.Reason+" "+e.Note)
		}
	}
	slices.Sort(out)
	return out
}

const shopEvents = "/apis/events.k8s.io/v1/namespaces/shop/events"

// hasEvents waits until the Events about a NetworkPolicy begin with these.
func (a *statusAPI) hasEvents(name string, want ...string) {
	a.t.Helper()
	eventually(a.t, "the Events on "+name, func() error {
		got := a.eventsOf(name)
		if !slices.EqualFunc(got, want, strings.HasPrefix) {
			return fmt.Errorf("they are %q, want %q", got, want)
		}
		return nil
	})
}

func TestAPIStatusOfNetworkPoliciesIsToldByEvents(t *testing.T) {
	a := newStatusAPI(t)
	const small = "--limits-manifests=4KiB" // the API server rejects all other invalid manifests
	w := a.writer(small)
	large := func(ports int) object {
		p := networkPolicy("large", 80)
		var all []object
		for i := range ports {
			all = append(all, object{"protocol": "TCP", "port": 1000 + i})
		}
		p["spec"].(object)["ingress"] = []object{{"ports": all}}
		return p
	}
	warning := "Warning ExceedsShare what it selects is isolated: " +
		"exceeds the share of namespace shop of limits.manifests (4096)"
	a.do(http.MethodPost, networking, networkPolicy("good", 80))
	a.do(http.MethodPost, networking, large(200))
	a.hasEvents("large", warning)
	created := func() int { return a.events(http.StatusCreated) }
	before, again := created(), a.events(http.StatusConflict)

	// Neither a label nor another leader repeats the Event; a new generation gets a new one.
	a.do(http.MethodPatch, networking+"/large", object{"metadata": object{"labels": object{"team": "a"}}})
	w.end(syscall.SIGTERM)
	w = a.writer(small)
	eventually(t, "the new leader has looked", func() error {
		if a.events(http.StatusConflict) == again {
			return errors.New("it has not asked for the Event")
		}
		return nil
	})
	a.hasEvents("large", warning)
	if n := created(); n != before {
		t.Errorf("%d Events were made by a restart", n-before)
	}
	a.do(http.MethodPatch, networking+"/large", object{"spec": large(201)["spec"]})
	a.hasEvents("large", warning, warning)
	t.Logf("\n%s", a.kubectl("get", "events", "-n", "shop"))
	a.do(http.MethodPatch, networking+"/large", object{"spec": large(2)["spec"]})
	a.hasEvents("large", "Normal PolicyAccepted enforced as written", warning, warning)

	// If an Event has expired, the next leader creates it again if it is still true.
	a.do(http.MethodPatch, networking+"/large", object{"spec": large(203)["spec"]})
	a.hasEvents("large", "Normal PolicyAccepted", warning, warning, warning)
	a.do(http.MethodDelete, shopEvents, nil)
	w.end(syscall.SIGTERM)
	a.writer(small)
	a.hasEvents("large", warning)
	if got := a.eventsOf("good"); len(got) != 0 {
		t.Errorf("an accepted policy has the Events %q", got)
	}
}

// events counts the requests for an Event about a policy with this status code.
func (a *statusAPI) events(code int) (n int) {
	a.t.Helper()
	return a.requestsOf("events", fmt.Sprintf(`code="%d"`, code), `group="events.k8s.io"`, `verb="POST"`)
}

// TestAPIStatusOfAKindWithoutStatus: Cilium's schema of CiliumCIDRGroup has no status.
func TestAPIStatusOfAKindWithoutStatus(t *testing.T) {
	a := newStatusAPI(t)
	a.crd("AdminNetworkPolicy", "adminnetworkpolicies", "policy.networking.k8s.io", "Cluster", "v1alpha1")
	w := a.writer()
	for i := range 5 {
		a.do(http.MethodPost, adminPolicy, manifest(adminVersion, "AdminNetworkPolicy", "", fmt.Sprint("a", i),
			`{"priority":1,"subject":{"namespaces":{}}}`))
	}
	a.do(http.MethodPost, cilium, cnp("p", plain))
	a.says(cilium+"/p", "True", "Accepted")
	eventually(t, "the kind is named", func() error {
		if w.said("the API server keeps no status of a kind") != 1 {
			return errors.New("it is not")
		}
		return nil
	})
	a.do(http.MethodPost, cilium, cnp("q", plain))
	a.says(cilium+"/q", "True", "Accepted")
	if n := w.said("the API server keeps no status of a kind"); n != 1 {
		t.Errorf("the log names the kind %d times, want once", n)
	}
}

func TestAPIStatusOfAThousandBadPoliciesIsBounded(t *testing.T) {
	const many = 1000
	a := newStatusAPI(t)
	for i := range many {
		a.do(http.MethodPost, cilium, cnp(fmt.Sprint("p", i), unknown))
	}
	w := a.writer()
	for part := many / 5; part <= many; part += many / 5 { // the rate is limited
		eventually(t, fmt.Sprintf("%d are written", part), func() error {
			if n := a.patches("ciliumnetworkpolicies"); n < part {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
	}
	var all struct{ Items []withStatus }
	if err := json.Unmarshal(a.do(http.MethodGet, cilium, nil), &all); err != nil {
		t.Fatal(err)
	}
	for _, o := range all.Items {
		if len(o.Status.Conditions) != 1 || o.Status.Conditions[0].Reason != "Refused" {
			t.Errorf("a status is %+v", o.Status)
		}
	}
	a.do(http.MethodPost, cilium, cnp("zz", plain)) // of a later batch
	a.says(cilium+"/zz", "True", "Accepted")
	if n := a.patches("ciliumnetworkpolicies"); n != many+1 {
		t.Errorf("%d patches for %d policies", n, many)
	}
	if n := w.said("\n"); n > 50 {
		t.Errorf("the log has %d lines", n)
	}
}

// TestAPIStatusWriterMayDoNoMore checks the rights with the API server.
func TestAPIStatusWriterMayDoNoMore(t *testing.T) {
	a := newStatusAPI(t)
	may := func(want bool, verb, resource string, more ...string) {
		t.Helper()
		args := append([]string{
			"--kubeconfig=" + a.ready.Kubeconfig, "auth", "can-i", verb, resource,
			"--as=system:serviceaccount:" + system + ":sluice-status",
		}, more...)
		out, _ := exec.Command(program("k8s/kubectl"), args...).Output() // exits with an error for "no"
		if got := strings.TrimSpace(string(out)); got != map[bool]string{true: "yes", false: "no"}[want] {
			t.Errorf("may the account %s %s %v? %s", verb, resource, more, got)
		}
	}
	may(true, "patch", "ciliumcidrgroups.cilium.io/p", "--subresource=status")
	may(true, "patch", "ciliumnetworkpolicies.cilium.io/p", "--subresource=status", "-n", "shop")
	may(true, "update", "leases.coordination.k8s.io/sluice-status", "-n", system)
	may(false, "update", "leases.coordination.k8s.io/sluice-status", "-n", "shop")
	may(false, "update", "leases.coordination.k8s.io/another", "-n", system)
	may(false, "delete", "leases.coordination.k8s.io/sluice-status", "-n", system)
	may(true, "list", "nodes")
	for _, verb := range []string{"create", "update", "patch", "delete"} {
		may(false, verb, "ciliumnetworkpolicies.cilium.io", "-n", "shop")
		may(false, verb, "networkpolicies.networking.k8s.io", "-n", "shop")
		may(false, verb, "nodes")
		may(false, verb, "pods", "-n", "shop")
		may(false, verb, "services", "-n", "shop")
	}
	may(true, "get", "services", "-n", "shop")
	may(false, "list", "services", "-n", "shop")
	may(true, "create", "events.events.k8s.io", "-n", "shop")
	may(false, "patch", "events.events.k8s.io", "-n", "shop")
	may(false, "create", "events", "-n", "shop") // of the core
	may(false, "get", "secrets", "-n", system)
	may(false, "list", "pods", "-n", "shop")
}

// member is a node that runs only an identity service.
type member struct {
	*policyNode
	cluster identityv1.ClusterServiceClient
	process *exec.Cmd
	ended   chan error
}

// member registers a node with a range.
func (a *statusAPI) member(name string, number int) *member {
	a.t.Helper()
	m := &member{policyNode: &policyNode{t: a.t, dir: shortDir(a.t)}}
	m.process, m.ended = m.run("identity", "--node="+name, "--etcd-alive-ttl=5s", "--etcd-lease-ttl=30s",
		"--etcd-endpoints=unix://"+filepath.Join(a.dir, "etcd.sock"))
	a.t.Cleanup(m.stop)
	m.cluster = identityv1.NewClusterServiceClient(m.dial("identity"))
	register(a.t, m.cluster, fmt.Sprintf("10.9.%d.0/24", number), fmt.Sprintf("192.0.2.%d", number))
	return m
}

func (m *member) stop() {
	if m.process == nil {
		return
	}
	if err := m.process.Process.Signal(syscall.SIGTERM); err != nil {
		m.t.Error(err)
	}
	<-m.ended
	m.process = nil
}

// nodes returns the names of the cluster's nodes, sorted.
func (m *member) nodes() (names []string) {
	m.t.Helper()
	stream, err := m.cluster.ListNodes(m.t.Context(), &identityv1.ListNodesRequest{})
	if err != nil {
		m.t.Fatal(err)
	}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slices.Sort(names)
			return names
		}
		if err != nil {
			m.t.Fatal(err)
		}
		names = append(names, answer.GetNode().GetName())
	}
}

func (m *member) knows(what string, want ...string) {
	m.t.Helper()
	eventually(m.t, what, func() error {
		if got := m.nodes(); !slices.Equal(got, want) {
			return fmt.Errorf("the cluster knows %q, want %q", got, want)
		}
		return nil
	})
}

func TestAPIStatusWriterForgetsNodesWhoseObjectIsDeleted(t *testing.T) {
	const nodes = "/api/v1/nodes"
	a := newStatusAPI(t)
	members := make(map[string]*member)
	for i, name := range []string{"away", "back", "later", "own", "outside"} {
		members[name] = a.member(name, i)
		if name != "outside" { // shares etcd, but is not a node of Kubernetes
			a.do(http.MethodPost, nodes, object{"metadata": object{"name": name}})
		}
	}
	own := members["own"]
	own.knows("all are registered", "away", "back", "later", "outside", "own")
	dir := shortDir(t)
	identity := "--identity=" + filepath.Join(own.dir, "identity.sock")
	w := a.writerIn(dir, identity)
	saved := func(want string) {
		t.Helper()
		eventually(t, "the names of the Nodes are kept", func() error {
			content, err := os.ReadFile(filepath.Join(dir, "controller", "nodes.json"))
			if err == nil && string(content) != want {
				err = fmt.Errorf("they are %s, want %s", content, want)
			}
			return err
		})
	}
	saved(`{"nodes":["away","back","later","own"]}`)
	a.do(http.MethodPost, cilium, cnp("p", plain))
	a.says(cilium+"/p", "True", "Accepted") // it leads

	// A live node is forgotten once it is no longer alive; a node that returns is kept.
	members["outside"].stop()
	members["back"].stop()
	a.do(http.MethodDelete, nodes+"/away", nil)
	a.do(http.MethodDelete, nodes+"/back", nil)
	a.do(http.MethodPost, nodes, object{"metadata": object{"name": "back"}})
	if got := own.nodes(); !slices.Contains(got, "away") {
		t.Errorf("a node that is alive was forgotten: %q", got)
	}
	members["away"].stop()
	own.knows("the deleted node is forgotten", "back", "later", "outside", "own")
	saved(`{"nodes":["back","later","own"]}`)

	// A Node is deleted while no writer runs.
	w.end(syscall.SIGKILL)
	members["later"].stop()
	a.do(http.MethodDelete, nodes+"/later", nil)
	a.writerIn(dir, identity)
	own.knows("a deletion while no process ran", "back", "outside", "own")
}
