// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// storeAPI is an API server with the accounts and roles of the store.
type storeAPI struct {
	*apiServer
	network string // of the addresses of machines
}

func newStoreAPI(t *testing.T) *storeAPI {
	t.Helper()
	a := &storeAPI{newAPI(t), fmt.Sprintf("127.%d.%d.", 1+rand.IntN(254), rand.IntN(256))}
	a.account()
	for _, file := range []string{
		"serviceaccount", "role", "rolebinding", "reader-role", "reader-rolebinding", "clusterrole", "clusterrolebinding",
	} {
		a.kubectl("apply", "--filename=../../deploy/kubernetes/base/store-"+file+".yaml")
	}
	for _, node := range []string{"n1", "n2"} {
		a.do(http.MethodPost, "/api/v1/nodes", object{"metadata": object{"name": node}})
	}
	return a
}

// access returns the settings of a service with a token for the API server.
func (a *storeAPI) access(dir, name, token string) []string {
	a.t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return []string{
		"--kubernetes-api=" + a.ready.Server, "--kubernetes-token=" + file,
		"--kubernetes-ca=" + filepath.Join(a.dir, "ca.crt"),
	}
}

// storeProcess is sluice-store on a machine.
type storeProcess struct {
	*policyNode
	flags []string
}

// takeover is as short as the setting allows.
const takeover = "--kubernetes-takeover=6s"

func (a *storeAPI) store(name string, at int) *storeProcess {
	a.t.Helper()
	dir := shortDir(a.t)
	token := strings.TrimSpace(a.kubectl("create", "token", "sluice-store", "--namespace=sluice-system"))
	s := &storeProcess{policyNode: &policyNode{t: a.t, dir: dir}}
	s.flags = append(a.access(dir, "token", token), takeover, "--node="+name,
		fmt.Sprintf("--address=%s%d", a.network, at), "--etcd-socket="+filepath.Join(dir, "etcd.sock"))
	a.t.Cleanup(func() {
		if s.process != nil {
			s.end(syscall.SIGTERM)
		}
	})
	return s
}

func (s *storeProcess) start() {
	s.t.Helper()
	s.process, s.ended = s.run("store", s.flags...)
}

func (s *storeProcess) end(signal syscall.Signal) {
	s.t.Helper()
	if err := errors.Join(s.process.Process.Signal(signal), <-s.ended); err != nil && signal == syscall.SIGTERM {
		s.t.Errorf("the store ended with %s", err)
	}
	s.process = nil
}

func logged(dir, service, words string) error {
	content, err := os.ReadFile(filepath.Join(dir, service+".log"))
	if err == nil && !strings.Contains(string(content), words) {
		err = fmt.Errorf("the log of %s lacks %q", service, words)
	}
	return err
}

// storeNode is the identity service of a node.
type storeNode struct {
	identityv1.IdentityServiceClient
	*policyNode
	token string // file of the token for the store
}

// enrolToken returns a token of an account for a pod of the node.
func (a *storeAPI) enrolToken(account, node string, audience ...string) string {
	a.t.Helper()
	pod := account + "-" + node
	a.call(http.MethodPost, "/api/v1/namespaces/sluice-system/pods", object{
		"metadata": object{"name": pod},
		"spec": object{
			"nodeName": node, "serviceAccountName": account, "containers": []object{{"name": "c", "image": "none"}},
		},
	})
	args := []string{
		"create", "token", account, "--namespace=sluice-system", "--bound-object-kind=Pod", "--bound-object-name=" + pod,
	}
	for _, a := range audience {
		args = append(args, "--audience="+a)
	}
	return strings.TrimSpace(a.kubectl(args...))
}

func (a *storeAPI) node(name, token string) *storeNode {
	a.t.Helper()
	dir := shortDir(a.t)
	n := &storeNode{policyNode: &policyNode{t: a.t, dir: dir}, token: filepath.Join(dir, "store-token")}
	n.present(token)
	flags := append(a.access(dir, "token", a.enrolToken("sluice", name)), "--node="+name,
		"--etcd-store-dir="+filepath.Join(dir, "identity"), "--etcd-store-token="+n.token)
	var process *exec.Cmd
	process, n.ended = n.run("identity", flags...)
	a.t.Cleanup(func() { stop(a.t, process) })
	n.IdentityServiceClient = identityv1.NewIdentityServiceClient(n.dial("identity"))
	return n
}

// present makes a token the one by which the node enrols.
func (n *storeNode) present(token string) {
	n.t.Helper()
	if err := os.WriteFile(n.token, []byte(token), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// number returns the number of a label set.
func (n *storeNode) number(app string) (uint32, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
	defer cancel()
	answer, err := n.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{Labels: shopLabels(app), Reference: app})
	return answer.GetIdentity().GetNumber(), err
}

// gets waits until a label set has a number.
func (n *storeNode) gets(app string) (number uint32) {
	n.t.Helper()
	eventually(n.t, "a number for "+app, func() (err error) {
		number, err = n.number(app)
		return err
	})
	return number
}

// waits waits until new label sets get no number for a reason. Label sets before that may get one.
func (n *storeNode) waits(app, why string) {
	n.t.Helper()
	tries := 0
	eventually(n.t, "new label sets wait", func() error {
		tries++
		number, err := n.number(fmt.Sprintf("%s-%d", app, tries))
		if err == nil {
			return fmt.Errorf("%s-%d has the number %d", app, tries, number)
		}
		if !strings.Contains(err.Error(), why) {
			return err
		}
		return nil
	})
}

// published returns the epoch that the Lease and the ConfigMap have; empty if the two differ or one is missing.
func (a *storeAPI) published() string {
	a.t.Helper()
	var lease struct {
		Metadata struct{ Annotations map[string]string }
	}
	var config struct{ Data map[string]string }
	for path, to := range map[string]any{
		"/apis/coordination.k8s.io/v1/namespaces/sluice-system/leases/sluice-store": &lease,
		"/api/v1/namespaces/sluice-system/configmaps/sluice-store":                  &config,
	} {
		if _, answer := a.call(http.MethodGet, path, nil); json.Unmarshal(answer, to) != nil {
			return ""
		}
	}
	epoch := config.Data["epoch"]
	if lease.Metadata.Annotations["store.sluice.io/epoch"] != epoch {
		return ""
	}
	return epoch
}

func (a *storeAPI) epoch(want string) {
	a.t.Helper()
	eventually(a.t, "epoch "+want, func() error {
		if got := a.published(); got != want {
			return fmt.Errorf("epoch %q", got)
		}
		return nil
	})
}

// TestAPIStoreIsRunByOneProcess: nodes enrol by tokens of their pods, and follow the store to another process, which
// begins the next epoch only after the first one has ended. Objects that are lost, or of a backup, are written again.
func TestAPIStoreIsRunByOneProcess(t *testing.T) {
	a := newStoreAPI(t)
	n1 := a.node("n1", a.enrolToken("sluice", "n1", "sluice-store"))
	s1, s2 := a.store("m1", 10), a.store("m2", 11)
	s1.start()
	web := n1.gets("web")
	a.epoch("1")
	s2.start()

	// Tokens of others are refused.
	a.kubectl("create", "serviceaccount", "other", "--namespace=sluice-system")
	n2 := a.node("n2", a.enrolToken("other", "n2", "sluice-store"))
	refused := func(why string) {
		t.Helper()
		eventually(t, "a refusal: "+why, func() error { return logged(s1.dir, "store", why) })
	}
	refused("it belongs to system:serviceaccount:sluice-system:other")
	n2.present(a.enrolToken("sluice", "n2"))
	refused("target audiences")
	if _, err := os.Stat(filepath.Join(n2.dir, "identity", "store.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a node with tokens that are refused has credentials: %v", err)
	}
	n2.present(a.enrolToken("sluice", "n2", "sluice-store"))
	if again := n2.gets("web"); again != web {
		t.Errorf("web is %d on n2 and %d on n1", again, web)
	}

	// A process that continues with its data begins no epoch.
	s1.end(syscall.SIGTERM)
	s1.start()
	n1.gets("db")
	a.epoch("1")

	// Without the API server, another process may begin an epoch: nothing new.
	a.ask(apitest.Kill)
	n1.waits("cache", "has not renewed its Lease in Kubernetes")
	if again, err := n2.number("db"); err != nil || again == 0 {
		t.Errorf("a label set that the store knows, without the API server: %d, %v", again, err)
	}
	a.ask(apitest.Start)
	n1.gets("cache")
	a.epoch("1")

	a.ask(apitest.Save)
	// The process ends; the next one has no data, and nodes write what they hold.
	s1.end(syscall.SIGKILL)
	a.epoch("2")
	n1.waits("queue", "sluice-store was restored")
	if again := n2.gets("web"); again != web {
		t.Errorf("web was %d, and is %d in epoch 2", web, again)
	}
	s1.start()
	eventually(t, "the first process stands by", func() error { return logged(s1.dir, "store", `"epoch":1`) })

	for _, path := range []string{
		"/apis/coordination.k8s.io/v1/namespaces/sluice-system/leases/sluice-store",
		"/api/v1/namespaces/sluice-system/configmaps/sluice-store",
	} {
		a.do(http.MethodDelete, path, nil)
		a.epoch("2")
	}
	s1.end(syscall.SIGTERM) // else it continues, until it sees the later epoch
	a.ask(apitest.Restore)  // with epoch 1
	a.epoch("2")
	if again := n1.gets("web"); again != web {
		t.Errorf("web was %d, and is %d", web, again)
	}

	a.do(http.MethodDelete, "/api/v1/nodes/n2", nil)
	eventually(t, "the deleted node has no credentials", func() error { return logged(s2.dir, "store", `"node":"n2"}`) })
	eventually(t, "the deleted node is refused", func() error {
		return logged(s2.dir, "store", "the node n2 is not enrolled, or was revoked")
	})
}

// TestAPIStoreTakesRangesOfNodes: any node may register the settings of ipam first. Only a node on which
// sluice-controller runs publishes the podCIDRs of all nodes.
func TestAPIStoreTakesRangesOfNodes(t *testing.T) {
	a := newStoreAPI(t)
	a.kubectl("create", "serviceaccount", "sluice-status", "--namespace=sluice-system")
	var nodes []*storeNode
	for _, name := range []string{"n1", "n2"} {
		nodes = append(nodes, a.node(name, a.enrolToken("sluice", name, "sluice-store")))
	}
	a.store("m1", 10).start()
	for i, n := range nodes {
		cluster := identityv1.NewClusterServiceClient(n.dial("identity"))
		eventually(t, "the ranges of the node are registered", func() error {
			r, err := cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
				Underlay:  &identityv1.Underlay{Addresses: []string{fmt.Sprintf("192.0.2.%d", i+1)}, Mtu: 1500},
				PodRanges: &identityv1.PodRanges{Prefixes: []string{fmt.Sprintf("10.244.%d.0/24", i+1)}},
				Ipam:      &identityv1.IPAMSettings{Mode: identityv1.IPAMMode_IPAM_MODE_KUBERNETES},
			})
			if err == nil && !r.GetRegistered() {
				err = fmt.Errorf("etcd lacks the record: %v", r)
			}
			return err
		})
	}
	publish := func(n *storeNode) error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := identityv1.NewClusterServiceClient(n.dial("identity")).PublishPodCIDRs(ctx,
			&identityv1.PublishPodCIDRsRequest{Nodes: []*identityv1.NodePodCIDRs{
				{Name: "n1", PodCidrs: []string{"10.244.1.0/24"}}, {Name: "n2", PodCidrs: []string{"10.244.2.0/24"}},
			}})
		return err
	}
	eventually(t, "a node without sluice-controller is refused", func() error {
		if err := publish(nodes[1]); err == nil || !strings.Contains(err.Error(), "the etcd role of the nodes that run") {
			return fmt.Errorf("the answer to n2 is %v", err) //nolint:errorlint // may be nil
		}
		return nil
	})
	a.enrolToken("sluice-status", "n1") // its pod counts
	eventually(t, "the node of sluice-controller publishes podCIDRs", func() error { return publish(nodes[0]) })
	eventually(t, "the other node has the published podCIDRs", func() error { return publish(nodes[1]) })
}

// TestAPIStoreWithACorruptLogBeginsTheNextEpoch: etcd ends the process while it reads its log, and kubelet starts the
// container again, with the same data.
func TestAPIStoreWithACorruptLogBeginsTheNextEpoch(t *testing.T) {
	a := newStoreAPI(t)
	n := a.node("n1", a.enrolToken("sluice", "n1", "sluice-store"))
	s := a.store("m1", 10)
	s.start()
	web := n.gets("web")
	a.epoch("1")
	s.end(syscall.SIGKILL)
	logs, err := filepath.Glob(filepath.Join(s.dir, "store", "etcd", "member", "wal", "*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("logs %q, %v", logs, err)
	}
	for _, path := range logs {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		content[200] ^= 0xff
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		s.start()
		if err := <-s.ended; err == nil {
			t.Fatal("the process started with a corrupt log")
		}
	}
	s.start()
	a.epoch("2")
	if again := n.gets("web"); again != web {
		t.Errorf("web was %d, and is %d in epoch 2", web, again)
	}
}
