// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tenantNode is a development node whose sources follow a Kubernetes API.
type tenantNode struct {
	t        testing.TB
	a        *apiServer
	instance string
	run      string // the node's run directory
	pods     map[string]*tenantPod
	env      []string // environment of the services
	ports    []object // port mappings of new pods
}

// tenantPod is a pod in the API with its own network namespace.
type tenantPod struct {
	namespace, name, uid string
	address              string
}

func newTenantNode(t testing.TB, a *apiServer, settings map[string]string) *tenantNode {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: it brings up a node")
	}
	n := &tenantNode{t: t, a: a, instance: fmt.Sprintf("tenants-%d", os.Getpid()), pods: make(map[string]*tenantPod)}
	n.run = "/run/sluice-" + n.instance
	// The services run as other users, and read the credentials.
	access := t.TempDir()
	for _, file := range []string{"admin.kubeconfig", "admin.crt", "admin.key", "ca.crt"} {
		content, err := os.ReadFile(filepath.Join(a.dir, file))
		if err != nil {
			t.Fatal(err)
		}
		content = bytes.ReplaceAll(content, []byte(a.dir), []byte(access))
		if err := os.WriteFile(filepath.Join(access, file), content, 0o644); err != nil { //nolint:gosec // a test's own
			t.Fatal(err)
		}
	}
	for dir := access; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // a test's own
			t.Fatal(err)
		}
	}
	command := exec.Command(program("sluice"), "dev", "up", "--instance="+n.instance)
	n.env = os.Environ()
	for _, service := range []string{"POLICY", "LOADBALANCER", "IDENTITY", "IPAM"} {
		n.env = append(n.env,
			"SLUICE_"+service+"_KUBERNETES_KUBECONFIG="+filepath.Join(access, "admin.kubeconfig"))
	}
	for name, value := range settings {
		n.env = append(n.env, name+"="+value)
	}
	command.Env = n.env
	t.Cleanup(n.end)
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	n.relay()
	if err := command.Wait(); err != nil {
		t.Fatalf("dev up: %v: %s", err, &out)
	}
	return n
}

// relay forwards connections from the node's network namespace, in which the services run, to the API on the test's
// loopback address.
func (n *tenantNode) relay() {
	address := strings.TrimPrefix(n.a.ready.Server, "https://")
	var listener net.Listener
	eventually(n.t, "listen in the network namespace of the node", func() error {
		return inside("/run/netns/sluice-"+n.instance, func() (err error) {
			listener, err = net.Listen("tcp4", address)
			return err
		})
	})
	n.t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp4", address)
			if err != nil {
				from.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					io.Copy(way[1], way[0]) //nolint:errcheck // ends with either side
					way[0].Close()
					way[1].Close()
				}()
			}
		}
	}()
}

func (n *tenantNode) end() {
	if n.t.Failed() {
		for _, what := range []string{"status", "endpoint list", "policy list", "service list"} {
			args := append(strings.Fields(what), "--instance="+n.instance)
			out, err := exec.Command(program("sluice"), args...).CombinedOutput()
			n.t.Logf("%s (%v):\n%s", what, err, out)
		}
		for _, service := range []string{"policy", "loadbalancer", "identity", "datapath"} {
			content, err := os.ReadFile(filepath.Join(n.run, "log", service+".log"))
			n.t.Logf("%s (%v):\n%s", service, err, content[max(0, len(content)-6000):])
		}
	}
	for name := range n.pods {
		n.remove(name)
	}
	if out, err := exec.Command(program("sluice"), "dev", "down", "--instance="+n.instance).CombinedOutput(); err != nil {
		n.t.Errorf("dev down: %v: %s", err, out)
	}
}

// nodeName returns the node's name in the cluster.
func (n *tenantNode) nodeName() string { return "sluice-" + n.instance }

func (p *tenantPod) netns(n *tenantNode) string { return n.instance + "-" + p.namespace + "-" + p.name }

func (p *tenantPod) path(n *tenantNode) string { return "/run/netns/" + p.netns(n) }

// cni executes the plugin as a runtime does.
func (n *tenantNode) cni(command string, p *tenantPod) ([]byte, error) {
	config, err := os.ReadFile(filepath.Join(n.run, "cni", "sluice.json"))
	if err != nil {
		return nil, err
	}
	if n.ports != nil {
		var all object
		if err := json.Unmarshal(config, &all); err != nil {
			return nil, err
		}
		all["runtimeConfig"] = object{"portMappings": n.ports}
		if config, err = json.Marshal(all); err != nil {
			return nil, err
		}
	}
	plugin := exec.Command(program("sluice-cni"))
	plugin.Env = []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + p.netns(n), "CNI_IFNAME=eth0",
		"CNI_NETNS=" + p.path(n), "CNI_PATH=" + filepath.Dir(program("sluice-cni")),
		"CNI_ARGS=K8S_POD_NAMESPACE=" + p.namespace + ";K8S_POD_NAME=" + p.name +
			";K8S_POD_UID=" + p.uid + ";IgnoreUnknown=1",
	}
	plugin.Stdin = bytes.NewReader(config)
	out, err := plugin.Output()
	if err != nil {
		err = fmt.Errorf("%s of %s/%s: %w: %s", command, p.namespace, p.name, err, out)
	}
	return out, err
}

// add creates a pod in the API and connects it, as kubelet does.
func (n *tenantNode) add(namespace, name string, labels object) (*tenantPod, error) {
	answer := n.a.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods", object{
		"metadata": object{"name": name, "labels": labels},
		"spec":     object{"nodeName": n.nodeName(), "containers": []object{{"name": "c", "image": "none"}}},
	})
	var pod struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(answer, &pod); err != nil {
		return nil, err
	}
	p := &tenantPod{namespace: namespace, name: name, uid: pod.Metadata.UID}
	n.pods[namespace+"/"+name] = p
	if out, err := exec.Command("ip", "netns", "add", p.netns(n)).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("ip netns add: %w: %s", err, out)
	}
	out, err := n.cni("ADD", p)
	if err != nil {
		return nil, err
	}
	var result struct {
		IPs []struct {
			Address string `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(out, &result); err != nil || len(result.IPs) == 0 {
		return nil, fmt.Errorf("ADD answered %s: %v", out, err)
	}
	for _, ip := range result.IPs {
		if address, _, _ := strings.Cut(ip.Address, "/"); strings.Contains(address, ".") {
			p.address = address
		}
	}
	return p, nil
}

func (n *tenantNode) remove(key string) {
	p := n.pods[key]
	delete(n.pods, key)
	if _, err := n.cni("DEL", p); err != nil {
		n.t.Error(err)
	}
	err := exec.Command("ip", "netns", "del", p.netns(n)).Run()
	if _, staterr := os.Stat(p.path(n)); err != nil && !errors.Is(staterr, fs.ErrNotExist) {
		n.t.Error(err)
	}
	n.a.call(http.MethodDelete, "/api/v1/namespaces/"+p.namespace+"/pods/"+p.name, object{"gracePeriodSeconds": 0})
}

// inside runs f on a thread in a network namespace.
func inside(netns string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		file, err := os.Open(netns)
		if err == nil {
			defer file.Close()
			err = unix.Setns(int(file.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// serve answers with the pod's name on a port, until the test ends.
func (n *tenantNode) serve(p *tenantPod, port int) {
	n.t.Helper()
	var listener net.Listener
	err := inside(p.path(n), func() (err error) {
		listener, err = net.Listen("tcp4", fmt.Sprintf("%s:%d", p.address, port))
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, p.name) //nolint:errcheck // the client checks the answer
			c.Close()
		}
	}()
}

// connect returns the answer from an address.
func (n *tenantNode) connect(from *tenantPod, address string) (answer string, err error) {
	err = inside(from.path(n), func() error {
		c, err := net.DialTimeout("tcp4", address, 300*time.Millisecond)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		text, err := io.ReadAll(c)
		answer = string(text)
		return err
	})
	return answer, err
}

// reaches waits until the pod gets an answer from a pod with this name; "" means no connection.
func (n *tenantNode) reaches(what string, from *tenantPod, address, want string) {
	n.t.Helper()
	eventually(n.t, what, func() error {
		got, err := n.connect(from, address)
		if got != want || want == "" && err == nil {
			return fmt.Errorf("%s gets %q from %s (%v), want %q", from.name, got, address, err, want)
		}
		return nil
	})
}

// many calls f with each number below count, from several goroutines.
func many(count int, f func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	wg.Wait()
}

func (n *tenantNode) namespace(name string, labels object) {
	n.a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": name, "labels": labels}})
	n.a.do(http.MethodPost, "/api/v1/namespaces/"+name+"/serviceaccounts", object{"metadata": object{"name": "default"}})
}

func tenantService(namespace, name, ip string, ports int) (service, slice object) {
	var all, of []object
	for i := range ports {
		all = append(all, object{"name": fmt.Sprint("p", i), "port": 80 + i, "targetPort": 8080})
		of = append(of, object{"name": fmt.Sprint("p", i), "port": 8080})
	}
	meta := object{"name": name, "namespace": namespace}
	service = object{"metadata": meta, "spec": object{"clusterIP": ip, "ports": all}}
	slice = object{
		"addressType": "IPv4", "ports": of, "endpoints": []object{},
		"metadata": object{"name": name, "namespace": namespace, "labels": object{"kubernetes.io/service-name": name}},
	}
	return service, slice
}

func endpointsOf(p *tenantPod) []object {
	return []object{{"addresses": []string{p.address}, "conditions": object{"ready": true}}}
}

// victim uses every feature that a tenant can use, and fails the test if a result differs from the result in an empty
// cluster.
func (n *tenantNode) victim(round int) {
	t := n.t
	t.Helper()
	label := func(name string) string { return fmt.Sprintf("%s-%d", name, round) }
	pod := func(name string, labels object) *tenantPod {
		p, err := n.add("victim", label(name), labels)
		if err != nil {
			t.Fatalf("ADD of the tenant: %v", err)
		}
		return p
	}
	web, next := pod("web", object{"app": label("web")}), pod("next", object{"app": label("next")})
	client := pod("client", object{"app": label("client")})
	n.serve(web, 8080)
	n.serve(next, 8080)
	direct := web.address + ":8080"
	n.reaches("before any policy", client, direct, web.name)

	policies := "/apis/networking.k8s.io/v1/namespaces/victim/networkpolicies"
	n.a.do(http.MethodPost, policies, object{
		"metadata": object{"name": label("isolate")},
		"spec": object{
			"podSelector": object{"matchLabels": object{"app": label("web")}}, "policyTypes": []string{"Ingress"},
		},
	})
	n.reaches("policy that isolates", client, direct, "")
	n.a.do(http.MethodPost, policies, object{
		"metadata": object{"name": label("allow")},
		"spec": object{
			"podSelector": object{"matchLabels": object{"app": label("web")}},
			"ingress": []object{{"from": []object{{"podSelector": object{"matchLabels": object{
				"app": label("client"),
			}}}}}},
		},
	})
	n.reaches("policy that allows", client, direct, web.name)

	services, slices := "/api/v1/namespaces/victim/services", "/apis/discovery.k8s.io/v1/namespaces/victim/endpointslices"
	ip := fmt.Sprintf("10.96.0.%d", 20+round)
	service, slice := tenantService("victim", label("web"), ip, 1)
	slice["endpoints"] = endpointsOf(web)
	n.a.do(http.MethodPost, services, service)
	n.a.do(http.MethodPost, slices, slice)
	n.reaches("Service", client, ip+":80", web.name)
	n.a.do(http.MethodPatch, slices+"/"+label("web"), object{"endpoints": endpointsOf(next)})
	n.reaches("rolling update of the Service", client, ip+":80", next.name)

	n.a.do(http.MethodPatch, "/api/v1/namespaces/victim/pods/"+web.name, object{
		"metadata": object{"labels": object{"quarantine": "true"}},
	})
	n.reaches("quarantine label", client, direct, "")
	for _, p := range []*tenantPod{web, next, client} {
		n.remove("victim/" + p.name)
	}
	for _, path := range []string{
		services + "/" + label("web"), slices + "/" + label("web"),
		policies + "/" + label("isolate"), policies + "/" + label("allow"),
	} {
		n.a.do(http.MethodDelete, path, nil)
	}
}

// TestAPITenantKeepsWhatItHasBesideANoisyOne exhausts limits that tenants share through objects of the API, first
// separately and then all together, from 500 namespaces of a tenant without a label. Meanwhile another tenant uses
// policies, Services, label changes and pods. Each round checks that its limit is exhausted.
//
// Other limits are exhausted elsewhere (reference/bounds.md has all tests):
//   - identity numbers, label changes, and the limits of policy tables: TestAPITenantKeepsItsTablesBesideANoisyOne
//   - host ports, and addresses in quarantine: TestAPITenantKeepsItsPodsBesideANoisyOne
//   - number of policy tables: TestKernelTenantThatFillsTheMapsLeavesRoomForAnother, without 1,600 pods
//   - sets of layer 7 rules: TestOneTenantDoesNotUseUpTheRuleSets, without 65,535 policies and pods that they select
//   - DNS names: TestNamesOfOneTenantKeepOutNoneOfAnother; DNS answers fill them, not objects of the API
//   - places of lists and tables of the datapath: TestKernelListsOfOneTenantLeavePiecesForOthers; the limit of backends
//     is smaller here
func TestAPITenantKeepsWhatItHasBesideANoisyOne(t *testing.T) {
	a := newAPI(t)
	a.crds()
	n := newTenantNode(t, a, map[string]string{
		"SLUICE_POLICY_LIMITS_POLICIES": "200", "SLUICE_POLICY_LIMITS_MANIFESTS": "1MiB",
		"SLUICE_LOADBALANCER_LIMITS_FRONTENDS": "200", "SLUICE_LOADBALANCER_LIMITS_BACKENDS": "400",
		"SLUICE_LOADBALANCER_LIMITS_SERVICES": "300", "SLUICE_LOADBALANCER_LIMITS_ENDPOINT_SLICES": "300",
	})
	n.namespace("victim", object{"sluice.io/tenant": "victim"})
	a.do(http.MethodPost, "/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies", manifest("cilium.io/v2",
		"CiliumClusterwideNetworkPolicy", "", "quarantine",
		`{"endpointSelector": {"matchLabels": {"quarantine": "true"}}, "ingressDeny": [{"fromEntities": ["all"]}]}`))
	n.victim(0)

	const namespaces = 500
	noisy := func(i int) string { return fmt.Sprintf("noisy-%03d", i%namespaces) }
	many(namespaces, func(i int) {
		a.call(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": noisy(i)}})
	})
	wide := make([]object, 250)
	for i := range wide {
		wide[i] = object{"ipBlock": object{"cidr": fmt.Sprintf("198.18.%d.0/24", i)}}
	}
	services := func(namespace string) string { return "/api/v1/namespaces/" + namespace + "/services" }
	slices := func(namespace string) string {
		return "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices"
	}
	policies := func(namespace string) string {
		return "/apis/networking.k8s.io/v1/namespaces/" + namespace + "/networkpolicies"
	}
	// withSlice makes a Service of a namespace with a slice of some endpoints.
	withSlice := func(i int, name string, annotations object, endpoints int) {
		service, slice := tenantService(noisy(i), name, "", 1)
		delete(service["spec"].(object), "clusterIP")             //nolint:forcetypeassert // of tenantService
		service["metadata"].(object)["annotations"] = annotations //nolint:forcetypeassert // of tenantService
		var all []object
		for k := range endpoints {
			all = append(all, object{"addresses": []string{fmt.Sprintf("10.8.%d.%d", i%256, 10+k)}})
		}
		slice["endpoints"] = all
		n.a.call(http.MethodPost, services(noisy(i)), service)
		n.a.call(http.MethodPost, slices(noisy(i)), slice)
	}
	// slice makes a slice of a Service of the round of frontends.
	slice := func(i, endpoints int) {
		_, slice := tenantService(noisy(i%60), fmt.Sprint("many-ports-", i%60), "", 1)
		slice["metadata"].(object)["name"] = fmt.Sprint("slice-", i) //nolint:forcetypeassert // of tenantService
		var all []object
		for k := range endpoints {
			all = append(all, object{"addresses": []string{fmt.Sprintf("10.9.%d.%d", i%256, 10+k+i/256*5)}})
		}
		slice["endpoints"] = all
		n.a.call(http.MethodPost, slices(noisy(i%60)), slice)
	}
	const ranged = 20 // Services with source ranges
	round := 0
	for _, flood := range []struct {
		bound string
		count int
		make  func(i int)
		// exhausted are the limits in `sluice shares` that the flood exceeds.
		exhausted []string
		// check is called after the flood, if the limit is not one of `sluice shares`.
		check func()
		undo  func(i int) // may be nil
	}{
		{
			bound: "source ranges of load balancers", count: ranged,
			make: func(i int) { n.loadBalancer(noisy(i), fmt.Sprint("ranges-", i), i, 1000) },
			check: func() {
				refused := 0
				for i := range ranged {
					if n.lacksSourceRanges(noisy(i), fmt.Sprint("ranges-", i)) {
						refused++
					}
				}
				if refused == 0 || refused == ranged {
					t.Errorf("%d of %d noisy Services lack source ranges, want some", refused, ranged)
				}
				n.loadBalancer("victim", "ranges", 200, 100)
				if n.lacksSourceRanges("victim", "ranges") {
					t.Error("the Service of the other tenant lacks source ranges")
				}
				n.a.do(http.MethodDelete, services("victim")+"/ranges", nil)
			},
			undo: func(i int) { n.a.call(http.MethodDelete, services(noisy(i))+"/"+fmt.Sprint("ranges-", i), nil) },
		},
		{
			bound: "tables of the annotation for consistent hashing", count: 40,
			make: func(i int) {
				withSlice(i, fmt.Sprint("table-", i), object{"sluice.io/load-balancing-algorithm": "table"}, 20)
			},
			exhausted: []string{"backends"},
			undo: func(i int) {
				n.a.call(http.MethodDelete, services(noisy(i))+"/"+fmt.Sprint("table-", i), nil)
				n.a.call(http.MethodDelete, slices(noisy(i))+"/"+fmt.Sprint("table-", i), nil)
			},
		},
		{
			// Fewer than the limit of policies: a policy beyond that limit has no bytes either.
			bound: "bytes of policies", count: 150, exhausted: []string{"manifests"},
			make: func(i int) {
				n.a.call(http.MethodPost, policies(noisy(i)), object{
					"metadata": object{"name": fmt.Sprint("wide-", i)},
					"spec":     object{"podSelector": object{}, "ingress": []object{{"from": wide}}},
				})
			},
			undo: func(i int) { n.a.call(http.MethodDelete, policies(noisy(i))+"/"+fmt.Sprint("wide-", i), nil) },
		},
		{bound: "policies", count: 600, exhausted: []string{"policies"}, make: func(i int) {
			n.a.call(http.MethodPost, policies(noisy(i)), object{
				"metadata": object{"name": fmt.Sprint("small-", i)}, "spec": object{"podSelector": object{}},
			})
		}},
		{bound: "frontends", count: 60, exhausted: []string{"frontends"}, make: func(i int) {
			service, _ := tenantService(noisy(i), fmt.Sprint("many-ports-", i), "", 10)
			delete(service["spec"].(object), "clusterIP") //nolint:forcetypeassert // of tenantService
			n.a.call(http.MethodPost, services(noisy(i)), service)
		}},
		{bound: "backends", count: 200, exhausted: []string{"backends"}, make: func(i int) { slice(i, 5) }},
		{bound: "Services", count: 600, exhausted: []string{"services"}, make: func(i int) {
			service, _ := tenantService(noisy(i), fmt.Sprint("headless-", i), "None", 1)
			n.a.call(http.MethodPost, services(noisy(i)), service)
		}},
		{bound: "EndpointSlices", count: 600, exhausted: []string{"endpointSlices"}, make: func(i int) { slice(200+i, 1) }},
	} {
		round++
		t.Logf("round %d: %s", round, flood.bound)
		many(flood.count, flood.make)
		if flood.check != nil {
			flood.check()
		} else {
			n.exceeded(flood.exhausted...)
		}
		n.victim(round)
		if flood.undo != nil {
			many(flood.count, flood.undo)
			n.within(flood.exhausted...) // so that a later round can exhaust it
		}
	}

	t.Log("the services start again, and list everything")
	for _, service := range []string{"policy", "loadbalancer", "identity"} {
		restart := exec.Command(program("sluice"), "dev", "restart", service, "--instance="+n.instance)
		restart.Env = n.env
		if out, err := restart.CombinedOutput(); err != nil {
			t.Fatalf("restart %s: %v: %s", service, err, out)
		}
	}
	n.victim(round + 1)
}

// loadBalancer makes a Service with a load balancer address and a number of source ranges.
func (n *tenantNode) loadBalancer(namespace, name string, number, ranges int) {
	n.t.Helper()
	var all []string
	for i := range ranges {
		all = append(all, fmt.Sprintf("198.%d.%d.%d/32", number, i/256, i%256))
	}
	path := "/api/v1/namespaces/" + namespace + "/services"
	n.a.do(http.MethodPost, path, object{
		"metadata": object{"name": name},
		"spec": object{
			"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "loadBalancerSourceRanges": all,
			"ports": []object{{"port": 80, "targetPort": 8080}},
		},
	})
	n.a.do(http.MethodPatch, path+"/"+name+"/status", object{"status": object{"loadBalancer": object{
		"ingress": []object{{"ip": fmt.Sprint("203.0.113.", number)}},
	}}})
}

// lacksSourceRanges waits until the node enforces a Service of loadBalancer or refuses its source ranges, and reports
// whether it refuses them.
func (n *tenantNode) lacksSourceRanges(namespace, name string) (lacks bool) {
	n.t.Helper()
	eventually(n.t, "source ranges of "+namespace+"/"+name, func() error {
		args := []string{"service", "get", namespace + "/" + name, "-o", "json", "--instance=" + n.instance}
		out, err := exec.Command(program("sluice"), args...).CombinedOutput()
		lacks = strings.Contains(string(out), "source ranges: ")
		if err == nil && !lacks && !strings.Contains(strings.ReplaceAll(string(out), " ", ""), `"enforced":true`) {
			err = errors.New("not enforced")
		}
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	return lacks
}
