// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
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
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// worldIPv4 is the identity of IPv4 addresses outside of a dual-stack cluster.
const worldIPv4 = 9

// patience is the timeout of a condition on a busy machine.
const patience = time.Minute

// apiServer is a Kubernetes API without a cluster.
type apiServer struct {
	t      testing.TB
	dir    string
	ready  apitest.Ready
	stdin  io.Writer
	stdout *json.Decoder
	http   *http.Client
}

// newAPI starts an API server that runs until the test ends.
func newAPI(t testing.TB) *apiServer {
	t.Helper()
	a := &apiServer{t: t, dir: t.TempDir()}
	command := exec.Command(program("test/sluice-k8s"), "api", a.dir)
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(stdin.Close(), command.Wait()); err != nil {
			t.Error(err)
		}
	})
	a.stdin, a.stdout = stdin, json.NewDecoder(stdout)
	a.wait()
	certificate, err := tls.LoadX509KeyPair(filepath.Join(a.dir, "admin.crt"), filepath.Join(a.dir, "admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(filepath.Join(a.dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	a.http = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{
		RootCAs: pool, Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13,
	}}}
	t.Cleanup(a.http.CloseIdleConnections)
	return a
}

func program(name string) string { return filepath.Join(os.Getenv("SLUICE_BIN"), name) }

// wait returns when the API reports that it is ready.
func (a *apiServer) wait() {
	a.t.Helper()
	if err := a.stdout.Decode(&a.ready); err != nil {
		a.t.Fatalf("the API is not ready: %s", err)
	}
}

// ask sends one of the commands of package apitest, and waits until it is done.
func (a *apiServer) ask(what string) {
	a.t.Helper()
	if _, err := fmt.Fprintln(a.stdin, what); err != nil {
		a.t.Fatal(err)
	}
	if what != apitest.Kill {
		a.wait()
		a.http.CloseIdleConnections()
	}
}

// call sends one request; the body is an object, or nil. It is safe for concurrent use. The status is 0 if there is
// no answer.
func (a *apiServer) call(method, path string, object any) (status int, answer []byte) {
	a.t.Helper()
	var body io.Reader
	if object != nil {
		data, err := json.Marshal(object)
		if err != nil {
			a.t.Error(err)
			return 0, nil
		}
		body = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(context.Background(), method, a.ready.Server+path, body)
	if err != nil {
		a.t.Error(err)
		return 0, nil
	}
	request.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		request.Header.Set("Content-Type", "application/merge-patch+json")
	}
	response, err := a.http.Do(request)
	if err != nil {
		a.t.Error(err)
		return 0, nil
	}
	defer response.Body.Close()
	if answer, err = io.ReadAll(response.Body); err != nil {
		a.t.Error(err)
		return 0, nil
	}
	return response.StatusCode, answer
}

// do sends one request, which must succeed.
func (a *apiServer) do(method, path string, object any) []byte {
	a.t.Helper()
	status, answer := a.call(method, path, object)
	if status/100 != 2 {
		a.t.Fatalf("%s %s: %d: %s", method, path, status, answer)
	}
	return answer
}

func (a *apiServer) kubectl(args ...string) string {
	a.t.Helper()
	all := append([]string{"--kubeconfig=" + a.ready.Kubeconfig, "--cache-dir=" + a.dir}, args...)
	out, err := exec.Command(program("k8s/kubectl"), all...).CombinedOutput()
	if err != nil {
		a.t.Fatalf("kubectl %s: %s: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// crds creates the CustomResourceDefinitions of deploy/kubernetes/crds, as its README describes.
func (a *apiServer) crds() {
	a.t.Helper()
	a.kubectl("create", "-k", "../../deploy/kubernetes/crds")
	for _, resource := range []string{
		"ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies", "ciliumcidrgroups", "ciliumloadbalancerippools",
	} {
		a.served("cilium.io/v2/" + resource)
	}
}

// served waits until a resource is served.
func (a *apiServer) served(resource string) {
	a.t.Helper()
	eventually(a.t, resource+" is served", func() error {
		if status, answer := a.call(http.MethodGet, "/apis/"+resource, nil); status != http.StatusOK {
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})
}

// crd creates a kind whose schema accepts every field.
func (a *apiServer) crd(kind, plural, group, scope string, versions ...string) {
	a.t.Helper()
	a.crdOf(object{}, kind, plural, group, scope, versions...)
}

// crdWithStatus creates a kind with status as a subresource.
func (a *apiServer) crdWithStatus(kind, plural, group, scope string, versions ...string) {
	a.t.Helper()
	a.crdOf(object{"status": object{}}, kind, plural, group, scope, versions...)
}

func (a *apiServer) crdOf(subresources object, kind, plural, group, scope string, versions ...string) {
	a.t.Helper()
	var all []object
	for i, v := range versions {
		all = append(all, object{
			"name": v, "served": true, "storage": i == 0, "schema": everything, "subresources": subresources,
		})
	}
	metadata := object{"name": plural + "." + group}
	if strings.HasSuffix(group, "k8s.io") { // required by the API server for these groups
		metadata["annotations"] = object{"api-approved.kubernetes.io": "https://github.com/kubernetes/enhancements"}
	}
	a.do(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", object{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata,
		"spec": object{
			"group": group, "scope": scope, "versions": all,
			"names": object{"kind": kind, "plural": plural, "singular": strings.ToLower(kind)},
		},
	})
	for _, v := range versions {
		a.served(group + "/" + v + "/" + plural)
	}
}

type object = map[string]any

// everything is a schema that accepts every field.
var everything = object{"openAPIV3Schema": object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}

// eventually fails the test if a condition is not met in time.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for ; ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", what, err)
		}
	}
}

// policyNode runs the identity and policy services, with the API's etcd.
type policyNode struct {
	policyv1.PolicyServiceClient
	identity identityv1.IdentityServiceClient

	t       testing.TB
	dir     string
	api     []string // flags of the policy service
	process *exec.Cmd
	ended   chan error
	web, db uint32 // identities of pods in namespace shop
}

// newPolicyNode starts the services. With access, the flags define the access to the API.
func newPolicyNode(t testing.TB, a *apiServer, access ...string) *policyNode {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-node") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &policyNode{t: t, dir: dir, api: access}
	flags := []string{"--node=n1", "--etcd-endpoints=unix://" + filepath.Join(a.dir, "etcd.sock")}
	if access == nil {
		n.api = []string{"--kubernetes-kubeconfig=" + a.ready.Kubeconfig}
		flags = append(flags, n.api...)
	}
	identity, _ := n.run("identity", flags...)
	t.Cleanup(func() { stop(t, identity) })
	conn := n.dial("identity")
	n.identity = identityv1.NewIdentityServiceClient(conn)
	for i, app := range []string{"web", "db"} {
		request := &identityv1.AllocateIdentityRequest{Labels: shopLabels(app), Reference: app}
		answer, err := n.identity.AllocateIdentity(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		*[]*uint32{&n.web, &n.db}[i] = answer.GetIdentity().GetNumber()
	}
	n.PolicyServiceClient = policyv1.NewPolicyServiceClient(n.dial("policy"))
	n.start()
	t.Cleanup(func() { n.end(syscall.SIGTERM) })
	return n
}

func shopLabels(app string) []*workloadv1.Label {
	return []*workloadv1.Label{
		{Source: "k8s", Key: "app", Value: app},
		{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"},
		{Source: "k8s", Key: "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", Value: "shop"},
	}
}

func (n *policyNode) dial(service string) *grpc.ClientConn {
	n.t.Helper()
	conn, err := client.Dial(filepath.Join(n.dir, service+".sock"), client.Options{Timeout: patience, WaitForReady: true})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return conn
}

// run starts a service, whose log is printed if the test fails.
func (n *policyNode) run(service string, flags ...string) (*exec.Cmd, chan error) {
	n.t.Helper()
	file, err := os.OpenFile(filepath.Join(n.dir, service+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer file.Close()
	n.t.Cleanup(func() {
		if n.t.Failed() {
			if content, err := os.ReadFile(file.Name()); err == nil {
				n.t.Logf("%s:\n%s", service, content[max(0, len(content)-4000):])
			}
		}
	})
	command := exec.Command(program("sluice-"+service), append([]string{
		"--socket-path=" + filepath.Join(n.dir, service+".sock"), "--socket-group=-1", "--metrics-address=off",
		"--socket-also-root=" + strconv.Itoa(os.Getuid()), "--state-dir=" + filepath.Join(n.dir, service),
	}, flags...)...)
	command.Stderr = file
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := os.MkdirAll(filepath.Join(n.dir, service), 0o700); err != nil {
		n.t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		n.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	return command, ended
}

func stop(t testing.TB, command *exec.Cmd) {
	if err := command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

// start starts the policy service; end ends it.
func (n *policyNode) start() {
	n.t.Helper()
	flags := append([]string{"--sources-identity=" + filepath.Join(n.dir, "identity.sock")}, n.api...)
	n.process, n.ended = n.run("policy", flags...)
}

func (n *policyNode) end(signal syscall.Signal) {
	n.t.Helper()
	if err := n.process.Process.Signal(signal); err != nil {
		n.t.Fatal(err)
	}
	if err := <-n.ended; err != nil && signal == syscall.SIGTERM {
		n.t.Errorf("the end of the policy service: %s", err)
	}
}

// forget deletes the state of the policy service, which must have ended.
func (n *policyNode) forget() {
	n.t.Helper()
	if err := os.RemoveAll(filepath.Join(n.dir, "policy")); err != nil {
		n.t.Fatal(err)
	}
}

// list returns the policies as KIND NAMESPACE/NAME: ERROR, sorted.
func (n *policyNode) list() (all []string, policies map[string]*policyv1.Policy) {
	n.t.Helper()
	stream, err := n.ListPolicies(n.t.Context(), &policyv1.ListPoliciesRequest{WithManifests: true})
	if err != nil {
		n.t.Fatal(err)
	}
	policies = make(map[string]*policyv1.Policy)
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slices.Sort(all)
			return all, policies
		}
		if err != nil {
			n.t.Fatal(err)
		}
		p := answer.GetPolicy()
		name := strings.TrimPrefix(p.GetKey().GetNamespace()+"/"+p.GetKey().GetName(), "/")
		policies[p.GetKey().GetKind()+" "+name] = p
		text := p.GetKey().GetKind() + " " + name
		if !p.GetAccepted() {
			text += ": " + p.GetError()
		}
		all = append(all, text)
	}
}

// has waits until the policies equal the expected ones.
func (n *policyNode) has(what string, want ...string) {
	n.t.Helper()
	slices.Sort(want)
	eventually(n.t, what, func() error {
		if got, _ := n.list(); !slices.Equal(got, want) {
			return fmt.Errorf("the policies are %q, want %q", got, want)
		}
		return nil
	})
}

// source waits until the source is complete or not, and reports an expected problem.
func (n *policyNode) source(what string, synced bool, wrong ...string) {
	n.t.Helper()
	eventually(n.t, what, func() error {
		st, err := n.GetStatus(n.t.Context(), &policyv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		i := slices.IndexFunc(st.GetSources(), func(s *policyv1.SourceStatus) bool { return s.GetName() == "kubernetes" })
		if i < 0 {
			return errors.New("there is no source kubernetes")
		}
		s := st.GetSources()[i]
		if s.GetSynced() != synced || len(wrong) == 0 && s.GetError() != "" {
			return fmt.Errorf("the source is complete: %t, want %t; it says %q", s.GetSynced(), synced, s.GetError())
		}
		for _, w := range wrong {
			if !strings.Contains(s.GetError(), w) {
				return fmt.Errorf("the source says %q, want %q in it", s.GetError(), w)
			}
		}
		return nil
	})
}

// reaches waits until web can connect to db at a port, or cannot, also according to the policy tables.
func (n *policyNode) reaches(what string, port uint32, want bool) {
	n.t.Helper()
	n.passes(what, n.web, n.db, port, want)
}

// passes waits until TCP from one identity to another at a port is allowed, or denied.
func (n *policyNode) passes(what string, from, to, port uint32, want bool) {
	n.t.Helper()
	eventually(n.t, what, func() error {
		x, err := n.Explain(n.t.Context(), &policyv1.ExplainRequest{
			From: &policyv1.Peer{Identity: from}, To: &policyv1.Peer{Identity: to}, Protocol: 6, Port: port,
		})
		if err != nil {
			return err
		}
		if got := x.GetVerdict() == policyv1.Action_ACTION_ALLOW; got != want {
			return fmt.Errorf("port %d is reached: %t, want %t", port, got, want)
		}
		return nil
	})
}

// hasRule requires a rule of a kind in db's tables whose source location has a prefix.
func (n *policyNode) hasRule(prefix string) {
	n.t.Helper()
	var all []string
	answer, err := n.GetPolicyTable(n.t.Context(), &policyv1.GetPolicyTableRequest{Subject: n.db})
	if err != nil {
		n.t.Fatal(err)
	}
	for _, r := range append(answer.GetIngressRules(), answer.GetEgressRules()...) {
		for _, s := range r.GetSources() {
			all = append(all, s.GetKind()+" "+s.GetPath())
		}
	}
	if !slices.ContainsFunc(all, func(r string) bool { return strings.HasPrefix(r, prefix) }) {
		n.t.Errorf("the tables of db have rules of %q, want one of %s", all, prefix)
	}
}

const (
	networking  = "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies"
	cilium      = "/apis/cilium.io/v2/namespaces/shop/ciliumnetworkpolicies"
	clusterwide = "/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies"
)

// networkPolicy returns a policy that lets web connect to db at a port.
func networkPolicy(name string, port int) object {
	return object{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": object{"name": name, "namespace": "shop"},
		"spec": object{
			"podSelector": object{"matchLabels": object{"app": "db"}},
			"ingress": []object{{
				"from":  []object{{"podSelector": object{"matchLabels": object{"app": "web"}}}},
				"ports": []object{{"protocol": "TCP", "port": port}},
			}},
		},
	}
}

// manifest returns an object with a spec in JSON.
func manifest(version, kind, namespace, name, spec string) object {
	metadata := object{"name": name}
	if namespace != "" {
		metadata["namespace"] = namespace
	}
	return object{"apiVersion": version, "kind": kind, "metadata": metadata, "spec": json.RawMessage(spec)}
}

func (a *apiServer) shop() {
	a.t.Helper()
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "shop"}})
}

func TestAPIPoliciesOfEachKindAreEnforced(t *testing.T) {
	a := newAPI(t)
	a.shop()
	a.crds()
	const admin, baseline = "policy.networking.k8s.io", "BaselineAdminNetworkPolicy"
	a.crd("ClusterNetworkPolicy", "clusternetworkpolicies", admin, "Cluster", "v1beta1")
	a.crd("AdminNetworkPolicy", "adminnetworkpolicies", admin, "Cluster", "v1alpha1")
	a.crd("BaselineAdminNetworkPolicy", "baselineadminnetworkpolicies", admin, "Cluster", "v1alpha1")
	n := newPolicyNode(t, a)
	n.source("an API without policies", true)
	n.reaches("no policy", 80, true)
	ports := func(port int) string {
		return fmt.Sprintf(`"toPorts":[{"ports":[{"port":"%d","protocol":"TCP"}]}]`, port)
	}
	db := `"endpointSelector":{"matchLabels":{"app":"db"}}`
	web := `"fromEndpoints":[{"matchLabels":{"app":"web"}}]`
	subject := `"subject":{"pods":{"namespaceSelector":{},"podSelector":{"matchLabels":{"app":"db"}}}}`
	deny := `,"ingress":[{"action":"Deny",` +
		`"from":[{"pods":{"namespaceSelector":{},"podSelector":{"matchLabels":{"app":"web"}}}}]`
	for _, c := range []struct {
		path, key string
		object    func(port int) object
		allows    bool // allows the port; otherwise denies it
	}{
		{networking, "NetworkPolicy shop/p", func(port int) object { return networkPolicy("p", port) }, true},
		{cilium, "CiliumNetworkPolicy shop/p", func(port int) object {
			spec := `{` + db + `,"ingress":[{` + web + `,` + ports(port) + `}]}`
			return manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "p", spec)
		}, true},
		{clusterwide, "CiliumClusterwideNetworkPolicy p", func(port int) object {
			o := manifest("cilium.io/v2", "CiliumClusterwideNetworkPolicy", "", "p", `null`)
			delete(o, "spec")
			o["specs"] = json.RawMessage(`[{` + db + `,"enableDefaultDeny":{"ingress":false},` +
				`"ingressDeny":[{` + web + `,` + ports(port) + `}]}]`)
			return o
		}, false},
		{"/apis/" + admin + "/v1beta1/clusternetworkpolicies", "ClusterNetworkPolicy p", func(port int) object {
			return manifest(admin+"/v1beta1", "ClusterNetworkPolicy", "", "p", `{"tier":"Admin","priority":1,`+subject+
				deny+fmt.Sprintf(`,"protocols":[{"tcp":{"destinationPort":{"number":%d}}}]}]}`, port))
		}, false},
		{"/apis/" + admin + "/v1alpha1/adminnetworkpolicies", "AdminNetworkPolicy p", func(port int) object {
			return manifest(admin+"/v1alpha1", "AdminNetworkPolicy", "", "p", `{"priority":1,`+subject+
				deny+fmt.Sprintf(`,"ports":[{"portNumber":{"protocol":"TCP","port":%d}}]}]}`, port))
		}, false},
		{"/apis/" + admin + "/v1alpha1/baselineadminnetworkpolicies", baseline + " default", func(port int) object {
			return manifest(admin+"/v1alpha1", "BaselineAdminNetworkPolicy", "", "default", `{`+subject+
				deny+fmt.Sprintf(`,"ports":[{"portNumber":{"protocol":"TCP","port":%d}}]}]}`, port))
		}, false},
	} {
		name := c.path + "/" + c.object(0)["metadata"].(object)["name"].(string)
		a.do(http.MethodPost, c.path, c.object(80))
		n.has(c.key+" is made", c.key)
		n.reaches(c.key+" is made", 80, c.allows)
		n.reaches(c.key+" is made", 81, !c.allows)
		kind, _, _ := strings.Cut(c.key, " ")
		n.hasRule(kind + " spec")
		a.do(http.MethodPatch, name, object{"spec": c.object(81)["spec"], "specs": c.object(81)["specs"]})
		n.reaches(c.key+" is changed", 81, c.allows)
		n.reaches(c.key+" is changed", 80, !c.allows)
		// A change outside of the spec does not change the policy.
		_, before := n.list()
		a.do(http.MethodPatch, name, object{"metadata": object{"annotations": object{"a": "b"}}})
		a.do(http.MethodDelete, name, nil)
		n.has(c.key + " is deleted")
		n.reaches(c.key+" is deleted", 80, true)
		if r := before[c.key].GetRevision(); r == 0 || before[c.key].GetSource() != "kubernetes" {
			t.Errorf("%s was listed as %v", c.key, before[c.key])
		}
	}
	a.groups(n)
	a.fields(n)
}

// groups checks that a CiliumCIDRGroup, which the API serves in two versions, is counted once.
func (a *apiServer) groups(n *policyNode) {
	a.t.Helper()
	const path = "/apis/cilium.io/v2/ciliumcidrgroups"
	world := func(what string, want bool) {
		a.t.Helper()
		eventually(a.t, what, func() error {
			x, err := n.Explain(a.t.Context(), &policyv1.ExplainRequest{
				// Without a datapath, sluice-identity does not know the address.
				From: &policyv1.Peer{Identity: worldIPv4, Address: "192.0.2.1"}, To: &policyv1.Peer{Identity: n.db},
				Protocol: 6, Port: 80,
			})
			if err != nil {
				return err
			}
			if got := x.GetVerdict() == policyv1.Action_ACTION_ALLOW; got != want {
				return fmt.Errorf("192.0.2.1 reaches db: %t, want %t", got, want)
			}
			return nil
		})
	}
	a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "g",
		`{"endpointSelector":{},"ingress":[{"fromCIDRSet":[{"cidrGroupRef":"office"}]}]}`))
	world("a group that does not exist", false)
	office := manifest("cilium.io/v2", "CiliumCIDRGroup", "", "office", `{"externalCIDRs":["192.0.2.0/24"]}`)
	a.do(http.MethodPost, path, office)
	world("a group is made", true)
	// The API serves another version in addition; the objects stay the same.
	a.do(http.MethodPatch, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ciliumcidrgroups.cilium.io", object{
		"spec": object{"versions": []object{
			{"name": "v2", "served": true, "storage": true, "schema": everything},
			{"name": "v2alpha1", "served": true, "storage": false, "schema": everything},
		}},
	})
	a.served("cilium.io/v2alpha1/ciliumcidrgroups")
	a.do(http.MethodPatch, path+"/office", object{"spec": object{"externalCIDRs": []string{"198.51.100.0/24"}}})
	world("a group is changed", false)
	n.has("two versions of a group", "CiliumCIDRGroup office", "CiliumNetworkPolicy shop/g")
	a.do(http.MethodDelete, path+"/office", nil)
	a.do(http.MethodDelete, cilium+"/g", nil)
	n.has("the group is deleted")
}

// fields checks which fields the schema keeps, and which are reported as unknown.
func (a *apiServer) fields(n *policyNode) {
	a.t.Helper()
	a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "whole",
		`{"endpointSelector":{"matchLabels":{"app":"db"}},
		"ingress":[{"fromEndpoints":[{}],"toPorts":[{"ports":[{"port":"80","protocol":"TCP"}]}]}],
		"ingressDeny":[{"fromEndpoints":[{}],"toPorts":[{"ports":[{"port":"81"}]}]}],
		"egress":[{"toServices":[{"k8sService":{"serviceName":"s"}}]}]}`))
	n.has("a policy with fields of all kinds", "CiliumNetworkPolicy shop/whole")
	_, policies := n.list()
	whole := policies["CiliumNetworkPolicy shop/whole"]
	for _, part := range []string{
		`"toPorts":[{"ports":[{"port":"80","protocol":"TCP"}]}]`, `"ingressDeny":[`, `"toServices":[`,
	} {
		if !bytes.Contains(whole.GetManifest(), []byte(part)) {
			a.t.Errorf("the API server dropped %s: %s", part, whole.GetManifest())
		}
	}
	if notes := fmt.Sprint(whole.GetNotes()); !strings.Contains(notes, "spec.egress[0].toServices") {
		a.t.Errorf("the notes are %s, want one on toServices", notes)
	}
	n.reaches("a port that is allowed", 80, true)
	n.reaches("a port that is denied", 81, false)
	n.reaches("a port that is not named", 82, false)
	misspelt := []object{{"fromEndpoint": []object{{}}}}
	a.do(http.MethodPatch, cilium+"/whole", object{"spec": object{"ingressDeny": nil, "ingress": misspelt}})
	const unknown = "CiliumNetworkPolicy shop/whole: spec.ingress[0].fromEndpoint: no such field"
	n.has("a field that is misspelt", unknown)
	n.reaches("a field that is misspelt", 80, false)
	odd := manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "odd", `{"endpointSelector":7,"ingress":[{}]}`)
	a.do(http.MethodPost, cilium, odd)
	const selector = "CiliumNetworkPolicy shop/odd: spec.endpointSelector: must be an object, is the number 7"
	n.has("an invalid selector", unknown, selector)
	st, err := n.GetStatus(a.t.Context(), &policyv1.GetStatusRequest{})
	if err != nil {
		a.t.Fatal(err)
	}
	if problems := fmt.Sprint(st.GetService().GetProblems()); !strings.Contains(problems, "CiliumNetworkPolicy shop/odd") {
		a.t.Errorf("the problems are %s, want one of the policy that cannot be converted", problems)
	}
	a.do(http.MethodDelete, cilium+"/whole", nil)
	n.has("the other stays", selector)
	n.reaches("without a selector it isolates the namespace", 80, false)
	a.do(http.MethodDelete, cilium+"/odd", nil)
	n.reaches("none is left", 80, true)
}

// pod creates a pod on the node and returns its identity.
func (a *apiServer) pod(n *policyNode, namespace, name string) uint32 {
	a.t.Helper()
	ports := []object{{"name": "http", "containerPort": 8080}}
	container := object{"name": "c", "image": "none", "ports": ports}
	var made struct {
		Metadata struct{ UID string } `json:"metadata"`
	}
	if err := json.Unmarshal(a.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods", object{
		"metadata": object{"name": name, "labels": object{"app": name}},
		"spec":     object{"nodeName": "n1", "containers": []object{container}},
	}), &made); err != nil {
		a.t.Fatal(err)
	}
	answer, err := n.identity.ResolveEndpoint(a.t.Context(), &identityv1.ResolveEndpointRequest{
		Owner: &workloadv1.Owner{ContainerId: namespace + name, InterfaceName: "eth0"},
		Pod:   &workloadv1.PodReference{Namespace: namespace, Name: name, Uid: made.Metadata.UID},
	})
	if err != nil {
		a.t.Fatal(err)
	}
	return answer.GetIdentity().GetNumber()
}

func TestAPIPoliciesSelectPodsByNamespaceAndPortsByName(t *testing.T) {
	a := newAPI(t)
	a.shop()
	a.crds()
	blue := object{"name": "depot", "labels": object{"team": "blue"}}
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": blue})
	for _, namespace := range []string{"shop", "depot"} {
		account := object{"metadata": object{"name": "default"}}
		a.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/serviceaccounts", account)
	}
	n := newPolicyNode(t, a)
	web, db, crane := a.pod(n, "shop", "web"), a.pod(n, "shop", "db"), a.pod(n, "depot", "crane")

	a.do(http.MethodPost, networking, manifest("networking.k8s.io/v1", "NetworkPolicy", "shop", "p",
		`{"podSelector":{"matchLabels":{"app":"db"}},"ingress":[{"ports":[{"port":"http"}],
		"from":[{"namespaceSelector":{"matchLabels":{"team":"blue"}}}]}]}`))
	n.passes("a named port, from a namespace by its label", crane, db, 8080, true)
	n.passes("another port", crane, db, 8081, false)
	n.passes("from another namespace", web, db, 8080, false)
	a.do(http.MethodDelete, networking+"/p", nil)

	const depot = "/apis/cilium.io/v2/namespaces/depot/ciliumnetworkpolicies"
	a.do(http.MethodPost, depot, manifest("cilium.io/v2", "CiliumNetworkPolicy", "depot", "p",
		`{"endpointSelector":{},"ingress":[{"fromEndpoints":[{}]}]}`))
	n.passes("a policy selects the pods of its namespace", web, crane, 80, false)
	n.passes("and no others", web, db, 80, true)
	n.passes("its peers are of its namespace, too", db, crane, 80, false)
	a.do(http.MethodDelete, depot+"/p", nil)

	from := func(labels string) object {
		return manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "p", `{"endpointSelector":{"matchLabels":{"app":"db"}},
			"ingress":[{"fromEndpoints":[{"matchLabels":{`+labels+`}}],
			"toPorts":[{"ports":[{"port":"HTTP","protocol":"TCP"}]}]}]}`)
	}
	a.do(http.MethodPost, cilium, from(`"app":"crane"`))
	n.passes("a peer without a namespace", crane, db, 8080, false)
	for _, labels := range []string{
		`"k8s:io.kubernetes.pod.namespace":"depot"`, `"io.cilium.k8s.namespace.labels.team":"blue"`,
	} {
		a.do(http.MethodDelete, cilium+"/p", nil)
		a.do(http.MethodPost, cilium, from(labels))
		n.passes(labels, crane, db, 8080, true)
		n.passes(labels, crane, db, 80, false)
		n.passes(labels, web, db, 8080, false)
	}
	a.do(http.MethodDelete, cilium+"/p", nil)

	a.do(http.MethodPost, clusterwide, manifest("cilium.io/v2", "CiliumClusterwideNetworkPolicy", "", "p",
		`{"endpointSelector":{"matchLabels":{"app":"db"}},"ingress":[{"fromEndpoints":[{"matchLabels":{"app":"crane"}}]}]}`))
	n.passes("a peer of a clusterwide policy", crane, db, 80, true)
	n.passes("another", web, db, 80, false)
}

func TestAPIKindsOfPolicyComeAndGo(t *testing.T) {
	a := newAPI(t)
	a.shop()
	a.do(http.MethodPost, networking, networkPolicy("p", 80))
	n := newPolicyNode(t, a)
	n.source("without the kinds of Cilium", true)
	n.has("without the kinds of Cilium", "NetworkPolicy shop/p")
	a.crds()
	deny := manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "deny",
		`{"endpointSelector":{},"enableDefaultDeny":{"ingress":false},"ingressDeny":[{"fromEndpoints":[{}]}]}`)
	a.do(http.MethodPost, cilium, deny)
	n.has("a kind appeared", "CiliumNetworkPolicy shop/deny", "NetworkPolicy shop/p")
	n.reaches("a kind appeared", 80, false)
	const crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ciliumnetworkpolicies.cilium.io"
	a.do(http.MethodDelete, crd, nil)
	n.has("a kind is deleted", "NetworkPolicy shop/p")
	n.reaches("a kind is deleted", 80, true)
	n.source("a kind is deleted", true)
	a.kubectl("create", "-f", "../../deploy/kubernetes/crds/ciliumnetworkpolicies.yaml")
	a.served("cilium.io/v2/ciliumnetworkpolicies")
	a.do(http.MethodPost, cilium, deny)
	n.has("a kind is back", "CiliumNetworkPolicy shop/deny", "NetworkPolicy shop/p")

	// Objects deleted while no process watches must disappear, although no event names them.
	n.end(syscall.SIGKILL)
	a.do(http.MethodDelete, crd, nil)
	eventually(t, "the kind is unavailable", func() error {
		if status, answer := a.call(http.MethodGet, cilium, nil); status != http.StatusNotFound {
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})
	n.start()
	n.has("a kind was deleted meanwhile", "NetworkPolicy shop/p")
	n.source("a kind was deleted meanwhile", true)

	// A version that Sluice does not know enforces nothing, and is reported.
	a.crd("AdminNetworkPolicy", "adminnetworkpolicies", "policy.networking.k8s.io", "Cluster", "v1beta9")
	n.source("a version that is not known", true, "adminnetworkpolicies: ", "policy.networking.k8s.io/v1beta9")
}

func TestAPIForbiddenKindIsNamedAndTheOthersGoOn(t *testing.T) {
	a := newAPI(t)
	a.shop()
	a.crds()
	role := func(cilium ...string) object {
		read := []string{"list", "watch"}
		return object{"metadata": object{"name": "policy"}, "rules": []object{
			{"apiGroups": []string{"networking.k8s.io"}, "resources": []string{"networkpolicies"}, "verbs": read},
			{"apiGroups": []string{"cilium.io"}, "resources": cilium, "verbs": read},
			{"apiGroups": []string{"discovery.k8s.io"}, "resources": []string{"endpointslices"}, "verbs": read},
		}}
	}
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	a.do(http.MethodPost, rbac+"/clusterroles", role("ciliumclusterwidenetworkpolicies"))
	a.do(http.MethodPost, rbac+"/clusterrolebindings", object{
		"metadata": object{"name": "policy"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "policy"},
		"subjects": []object{{"kind": "ServiceAccount", "name": "policy", "namespace": "shop"}},
	})
	a.do(http.MethodPost, "/api/v1/namespaces/shop/serviceaccounts", object{"metadata": object{"name": "policy"}})
	token := filepath.Join(a.dir, "token")
	secret := strings.TrimSpace(a.kubectl("create", "token", "-n", "shop", "policy"))
	if err := os.WriteFile(token, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	authority := "--kubernetes-ca=" + filepath.Join(a.dir, "ca.crt")
	n := newPolicyNode(t, a, "--kubernetes-api="+a.ready.Server, "--kubernetes-token="+token, authority)
	hidden := manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "hidden", `{"endpointSelector":{},"ingress":[{}]}`)
	a.do(http.MethodPost, cilium, hidden)
	a.do(http.MethodPost, networking, networkPolicy("p", 80))
	n.has("what is allowed", "NetworkPolicy shop/p")
	n.source("two kinds are forbidden", false,
		"ciliumnetworkpolicies", "ciliumcidrgroups", "forbidden", `User "system:serviceaccount:shop:policy"`)
	// Subscribers have to wait: an incomplete state would allow more than the complete one.
	revisions := n.tables(t.Context())
	a.do(http.MethodPatch, networking+"/p", object{"spec": networkPolicy("p", 81)["spec"]})
	n.reaches("the others go on", 81, true)
	all := role("ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies", "ciliumcidrgroups")
	a.do(http.MethodPut, rbac+"/clusterroles/policy", all)
	n.source("all are allowed", true)
	n.has("all are allowed", "CiliumNetworkPolicy shop/hidden", "NetworkPolicy shop/p")
	_, policies := n.list()
	if first, last := <-revisions, policies["CiliumNetworkPolicy shop/hidden"].GetRevision(); first < last {
		t.Errorf("a subscriber had tables of revision %d, before the last kind was listed at %d", first, last)
	}

	// Removing a right removes no policies, even after a restart.
	a.do(http.MethodPut, rbac+"/clusterroles/policy", role("ciliumclusterwidenetworkpolicies", "ciliumcidrgroups"))
	n.end(syscall.SIGKILL)
	a.do(http.MethodDelete, networking+"/p", nil)
	n.start()
	n.source("a right is taken away", false, "ciliumnetworkpolicies", "forbidden")
	n.has("a right is taken away", "CiliumNetworkPolicy shop/hidden")
	if revision := <-n.tables(t.Context()); revision == 0 {
		t.Error("a subscriber does not get the state that was complete before")
	}
}

func TestAPIThatWasAwayDeletesWhatItDeletedMeanwhile(t *testing.T) {
	a := newAPI(t)
	a.shop()
	a.crds()
	for _, name := range []string{"stays", "goes"} {
		a.do(http.MethodPost, networking, networkPolicy(name, 80))
		a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", name,
			`{"endpointSelector":{"matchLabels":{"app":"db"}},"ingress":[{"fromEndpoints":[{}]}]}`))
	}
	left := []string{"CiliumNetworkPolicy shop/stays", "NetworkPolicy shop/stays"}
	all := append([]string{"CiliumNetworkPolicy shop/goes", "NetworkPolicy shop/goes"}, left...)
	n := newPolicyNode(t, a)
	n.has("before", all...)

	// The API is killed, then the service: the last known state stays enforced.
	a.ask(apitest.Kill)
	n.source("the API is unavailable", true, "connection refused")
	n.has("the API is unavailable", all...)
	n.end(syscall.SIGKILL)
	n.start()
	n.source("the API is still unavailable", false, "connection refused")
	n.has("the API is still unavailable", all...)
	n.hasRule("NetworkPolicy spec.ingress[0]")
	a.ask(apitest.Start)
	n.source("the API is back", true)
	n.has("the API is back", all...)

	// The API restarts, with deletions, while the service is down.
	if err := n.process.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	a.do(http.MethodDelete, networking+"/goes", nil)
	a.do(http.MethodDelete, cilium+"/goes", nil)
	a.ask(apitest.Kill)
	a.ask(apitest.Start)
	if err := n.process.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.has("deletions meanwhile", left...)
	n.source("deletions meanwhile", true)
	n.end(syscall.SIGKILL)
	a.do(http.MethodDelete, networking+"/stays", nil)
	n.start()
	n.has("a deletion while the service was down", "CiliumNetworkPolicy shop/stays")
}

func TestAPIBurstOfPoliciesIsTakenByOneWatch(t *testing.T) {
	a := newAPI(t)
	a.shop()
	n := newPolicyNode(t, a)
	n.source("before", true)
	resident := n.resident()
	const burst = 1000
	began := time.Now()
	var failed []error
	done := make(chan error, 8)
	for w := range cap(done) {
		go func() {
			for i := w; i < burst; i += cap(done) {
				status, answer := a.call(http.MethodPost, networking, networkPolicy(fmt.Sprint("p", i), 1+i))
				if status != http.StatusCreated {
					done <- fmt.Errorf("%d: %s", status, answer)
					return
				}
			}
			done <- nil
		}()
	}
	for range cap(done) {
		failed = append(failed, <-done)
	}
	if err := errors.Join(failed...); err != nil {
		t.Fatal(err)
	}
	made := time.Since(began)
	n.reaches("the last policy", burst, true)
	eventually(t, "all policies", func() error {
		if got, _ := n.list(); len(got) != burst {
			return fmt.Errorf("there are %d policies, want %d", len(got), burst)
		}
		return nil
	})
	taken := time.Since(began)
	lists, watches := a.requests("networkpolicies")
	t.Logf("%d policies were made in %s and taken over %s later; %d listings, %d watches",
		burst, made.Round(time.Millisecond), (taken - made).Round(time.Millisecond), lists, watches)
	t.Logf("resident before %d kB, after %d kB", resident, n.resident())
	if lists > 1 || watches > 2 {
		t.Errorf("the API server served %d listings and %d watches of networkpolicies, want <= 1 and 2", lists, watches)
	}
	// Killed twice meanwhile, the service removes exactly what was deleted.
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "depot"}})
	other := networkPolicy("stays", 80)
	other["metadata"].(object)["namespace"] = "depot"
	a.do(http.MethodPost, strings.Replace(networking, "shop", "depot", 1), other)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		a.call(http.MethodDelete, networking, nil)
	}()
	for range 2 {
		eventually(t, "the policy that stays", func() error {
			if _, all := n.list(); all["NetworkPolicy depot/stays"] == nil {
				return errors.New("it is not listed")
			}
			return nil
		})
		n.end(syscall.SIGKILL)
		n.start()
	}
	<-gone
	n.has("all are deleted", "NetworkPolicy depot/stays")
	n.reaches("all are deleted", 80, true)
}

// resident returns the resident memory of the policy service in kB.
func (n *policyNode) resident() int {
	n.t.Helper()
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", n.process.Process.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "VmRSS:"); ok {
			kB, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(rest, "kB")))
			if err != nil {
				n.t.Fatal(err)
			}
			return kB
		}
	}
	n.t.Fatal("the kernel reports no resident memory")
	return 0
}

// requests counts the lists and watches of a resource, ended or running, except the API server's own.
func (a *apiServer) requests(resource string) (lists, watches int) {
	a.t.Helper()
	count := func(line string) int {
		i := strings.LastIndexByte(line, ' ')
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			a.t.Fatal(err)
		}
		return int(value)
	}
	for line := range strings.Lines(string(a.do(http.MethodGet, "/metrics", nil))) {
		line = strings.TrimSpace(line)
		if !strings.Contains(line, `resource="`+resource+`"`) {
			continue
		}
		switch {
		case strings.HasPrefix(line, "apiserver_request_total{") && strings.Contains(line, `verb="LIST"`):
			lists += count(line)
		case strings.HasPrefix(line, "apiserver_request_total{") && strings.Contains(line, `verb="WATCH"`),
			strings.HasPrefix(line, "apiserver_longrunning_requests{") && strings.Contains(line, `verb="WATCH"`):
			watches += count(line)
		}
	}
	return lists, watches
}
