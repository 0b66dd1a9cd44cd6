// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

// Selector selects the pods of the DaemonSet and the DaemonSet itself.
const Selector = "app.kubernetes.io/name=sluice"

// Node is a node of the cluster with its pod of Sluice.
type Node struct {
	Name      string
	Pod       *Pod   // nil if there is none
	NoPod     string // why there is no pod, if Selected is false
	Selected  bool   // the DaemonSet selects the node
	Problem   string // of the Node object; empty if it is Ready
	Addresses []string
	Kubelet   int // port of its kubelet
}

// Pod is a pod of Sluice.
type Pod struct {
	Name, UID  string
	Terminates bool
	Created    time.Time
	Containers []Container
	// Inits are the names of the init containers.
	Inits []string
}

// Container is a container of a pod.
type Container struct {
	Name     string
	Image    string
	Ready    bool
	Running  bool
	Restarts int
	Waits    string // reason and message if the container does not run
}

// Cluster contains the nodes of a cluster and Sluice's DaemonSet.
type Cluster struct {
	Nodes     []Node // by name
	DaemonSet DaemonSet
	// Unlisted is the error of the list of nodes. If it is set, nodes without a pod are missing.
	Unlisted error
}

// DaemonSet is Sluice's DaemonSet.
type DaemonSet struct {
	Name         string
	Image        string // of the container in which the command runs
	PullPolicy   string
	NodeSelector map[string]string
	PullSecrets  []string

	Desired, Ready, Updated int
}

// Workload is a pod of a workload.
type Workload struct {
	Namespace, Name string
	Node            string // empty: not scheduled yet
	Phase           string
	HostNetwork     bool
	Addresses       []string
}

// Pod asks the API for the pod NAMESPACE/NAME.
func (c *Client) Pod(ctx context.Context, name string) (Workload, error) {
	w := Workload{}
	w.Namespace, w.Name, _ = strings.Cut(name, "/")
	var found list[struct {
		Spec struct {
			NodeName    string `json:"nodeName"`
			HostNetwork bool   `json:"hostNetwork"`
		} `json:"spec"`
		Status struct {
			Phase  string `json:"phase"`
			PodIPs []struct {
				IP string `json:"ip"`
			} `json:"podIPs"`
		} `json:"status"`
	}]
	err := c.Get(ctx, &found, "pods", "--namespace="+w.Namespace, "--field-selector=metadata.name="+w.Name)
	if err != nil {
		return w, err
	}
	if len(found.Items) == 0 {
		return w, fmt.Errorf("pod %s not found", name)
	}
	p := found.Items[0]
	w.Node, w.Phase, w.HostNetwork = p.Spec.NodeName, p.Status.Phase, p.Spec.HostNetwork
	for _, a := range p.Status.PodIPs {
		w.Addresses = append(w.Addresses, a.IP)
	}
	return w, nil
}

// Ready returns the readiness of each container.
func (p *Pod) Ready() map[string]bool {
	ready := map[string]bool{}
	for _, c := range p.Containers {
		ready[c.Name] = c.Ready
	}
	return ready
}

// Container returns the name of the container in which `sluice` is executed, because it has all sockets.
func (n Node) Container() (string, error) {
	if n.Pod == nil {
		return "", errors.New("the node has no pod of Sluice")
	}
	var waits []string
	for _, name := range []string{"cni", "datapath"} {
		i := slices.IndexFunc(n.Pod.Containers, func(c Container) bool { return c.Name == name })
		switch {
		case i < 0:
		case n.Pod.Containers[i].Running:
			return name, nil
		default:
			waits = append(waits, fmt.Sprintf("container %s does not run: %s", name, n.Pod.Containers[i].Waits))
		}
	}
	return "", errors.New(cmp.Or(strings.Join(waits, "; "), "the pod has no container cni"))
}

// Types for the fields of API objects that this package needs.
type (
	meta struct {
		Name              string            `json:"name"`
		UID               string            `json:"uid"`
		Labels            map[string]string `json:"labels"`
		CreationTimestamp time.Time         `json:"creationTimestamp"`
		DeletionTimestamp *time.Time        `json:"deletionTimestamp"`
	}
	podSpec struct {
		NodeName         string                  `json:"nodeName"`
		NodeSelector     map[string]string       `json:"nodeSelector"`
		ImagePullSecrets []struct{ Name string } `json:"imagePullSecrets"`
		InitContainers   []struct{ Name string } `json:"initContainers"`
		Containers       []struct {
			Name            string `json:"name"`
			Image           string `json:"image"`
			ImagePullPolicy string `json:"imagePullPolicy"`
		} `json:"containers"`
	}
	stateOf struct {
		Running *struct{} `json:"running"`
		Waiting *struct {
			Reason  string `json:"reason"`
			Message string `json:"message"`
		} `json:"waiting"`
		Terminated *struct {
			Reason   string `json:"reason"`
			ExitCode int    `json:"exitCode"`
		} `json:"terminated"`
	}
	containerStatus struct {
		Name         string  `json:"name"`
		Ready        bool    `json:"ready"`
		RestartCount int     `json:"restartCount"`
		State        stateOf `json:"state"`
	}
	pod struct {
		Metadata meta    `json:"metadata"`
		Spec     podSpec `json:"spec"`
		Status   struct {
			Phase             string            `json:"phase"`
			Reason            string            `json:"reason"`
			Message           string            `json:"message"`
			ContainerStatuses []containerStatus `json:"containerStatuses"`
			InitStatuses      []containerStatus `json:"initContainerStatuses"`
		} `json:"status"`
	}
	node struct {
		Metadata meta `json:"metadata"`
		Status   struct {
			Conditions []struct {
				Type    string `json:"type"`
				Status  string `json:"status"`
				Message string `json:"message"`
			} `json:"conditions"`
			Addresses []struct {
				Type    string `json:"type"`
				Address string `json:"address"`
			} `json:"addresses"`
			DaemonEndpoints struct {
				KubeletEndpoint struct {
					Port int `json:"Port"`
				} `json:"kubeletEndpoint"`
			} `json:"daemonEndpoints"`
		} `json:"status"`
	}
	daemonSet struct {
		Metadata meta `json:"metadata"`
		Spec     struct {
			Template struct {
				Spec podSpec `json:"spec"`
			} `json:"template"`
		} `json:"spec"`
		Status struct {
			Desired int `json:"desiredNumberScheduled"`
			Ready   int `json:"numberReady"`
			Updated int `json:"updatedNumberScheduled"`
		} `json:"status"`
	}
	list[T any] struct {
		Items []T `json:"items"`
	}
)

// Cluster asks the API for the nodes, and for the DaemonSet with its pods.
func (c *Client) Cluster(ctx context.Context) (Cluster, error) {
	var pods list[pod]
	var sets list[daemonSet]
	var nodes list[node]
	var unlisted error
	var group errgroup.Group
	group.Go(func() error {
		return c.Get(ctx, &sets, "daemonsets", "--namespace="+c.Namespace, "--selector="+Selector)
	})
	group.Go(func() error {
		return c.Get(ctx, &pods, "pods", "--namespace="+c.Namespace, "--selector="+Selector)
	})
	// Errors are not fatal: the user may have access only to the namespace.
	group.Go(func() error {
		unlisted = c.Get(ctx, &nodes, "nodes")
		return nil
	})
	if err := group.Wait(); err != nil {
		return Cluster{}, err
	}
	if len(sets.Items) == 0 {
		return Cluster{}, fmt.Errorf("namespace %s has no DaemonSet with the label %s; select another with --namespace",
			c.Namespace, Selector)
	}
	all := join(sets.Items[0], pods.Items, nodes.Items, unlisted)
	return all, c.choose(&all)
}

// choose removes all nodes that --node does not list.
func (c *Client) choose(all *Cluster) error {
	if len(c.Nodes) == 0 {
		return nil
	}
	for _, name := range c.Nodes {
		if !slices.ContainsFunc(all.Nodes, func(n Node) bool { return n.Name == name }) {
			return invocation.Usagef("--node: the cluster has no node %q", name)
		}
	}
	all.Nodes = slices.DeleteFunc(all.Nodes, func(n Node) bool { return !slices.Contains(c.Nodes, n.Name) })
	return nil
}

// join assigns the pods to the nodes. It adds nodes that have a pod but are not listed.
func join(set daemonSet, pods []pod, nodes []node, unlisted error) Cluster {
	all := Cluster{DaemonSet: daemonSetOf(set), Unlisted: unlisted}
	byName := map[string]*Node{}
	for _, n := range nodes {
		byName[n.Metadata.Name] = nodeOf(n, all.DaemonSet)
	}
	for _, p := range pods {
		if p.Spec.NodeName == "" {
			continue // not scheduled yet
		}
		at := byName[p.Spec.NodeName]
		if at == nil {
			at = &Node{Name: p.Spec.NodeName, Selected: true}
			byName[at.Name] = at
		}
		// If a node has several pods, prefer one that is not terminating, then the newest.
		mine := podOf(p)
		if have := at.Pod; have == nil || have.Terminates && !mine.Terminates ||
			have.Terminates == mine.Terminates && mine.Created.After(have.Created) {
			at.Pod = mine
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		all.Nodes = append(all.Nodes, *byName[name])
	}
	return all
}

func daemonSetOf(set daemonSet) DaemonSet {
	d := DaemonSet{
		Name: set.Metadata.Name, NodeSelector: set.Spec.Template.Spec.NodeSelector,
		Desired: set.Status.Desired, Ready: set.Status.Ready, Updated: set.Status.Updated,
	}
	for _, c := range set.Spec.Template.Spec.Containers {
		if c.Name == "cni" {
			d.Image, d.PullPolicy = c.Image, c.ImagePullPolicy
		}
	}
	for _, s := range set.Spec.Template.Spec.ImagePullSecrets {
		d.PullSecrets = append(d.PullSecrets, s.Name)
	}
	return d
}

func nodeOf(n node, set DaemonSet) *Node {
	made := &Node{Name: n.Metadata.Name, Selected: true, Kubelet: n.Status.DaemonEndpoints.KubeletEndpoint.Port}
	for _, key := range slices.Sorted(maps.Keys(set.NodeSelector)) {
		if value := set.NodeSelector[key]; n.Metadata.Labels[key] != value {
			made.Selected = false
			made.NoPod = fmt.Sprintf("the DaemonSet wants nodes with the label %s=%s", key, value)
		}
	}
	for _, a := range n.Status.Addresses {
		if a.Type == "InternalIP" {
			made.Addresses = append(made.Addresses, a.Address)
		}
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == "Ready" && condition.Status != "True" {
			made.Problem = "the node is not Ready: " + condition.Message
		}
	}
	return made
}

func podOf(p pod) *Pod {
	made := &Pod{
		Name: p.Metadata.Name, UID: p.Metadata.UID, Created: p.Metadata.CreationTimestamp,
		Terminates: p.Metadata.DeletionTimestamp != nil,
	}
	for _, spec := range p.Spec.InitContainers {
		made.Inits = append(made.Inits, spec.Name)
	}
	for _, spec := range p.Spec.Containers {
		c := Container{Name: spec.Name, Image: spec.Image, Waits: reasonOf(p.Status.Reason, p.Status.Message)}
		for _, s := range p.Status.ContainerStatuses {
			if s.Name == spec.Name {
				c.Ready, c.Restarts, c.Running, c.Waits = s.Ready, s.RestartCount, s.State.Running != nil, s.State.waits()
			}
		}
		if c.Waits = cmp.Or(c.Waits, "the pod is "+cmp.Or(p.Status.Phase, "new")); c.Waits == "PodInitializing" {
			c.Waits += initializing(p.Status.InitStatuses)
		}
		made.Containers = append(made.Containers, c)
	}
	return made
}

// waits returns the reason for which a container does not run; empty if it runs.
func (s stateOf) waits() string {
	switch {
	case s.Waiting != nil:
		return reasonOf(s.Waiting.Reason, s.Waiting.Message)
	case s.Terminated != nil:
		return fmt.Sprintf("%s, exit code %d", s.Terminated.Reason, s.Terminated.ExitCode)
	}
	return ""
}

// initializing returns the name of the init container that the others wait for.
func initializing(all []containerStatus) string {
	for _, s := range all {
		switch t := s.State.Terminated; {
		case t != nil && t.ExitCode == 0:
		case s.State.Running != nil:
			return ": init container " + s.Name + " runs"
		default:
			return ": init container " + s.Name + ": " + cmp.Or(s.State.waits(), "it is new")
		}
	}
	return ""
}

func reasonOf(reason, message string) string {
	if reason == "" || message == "" {
		return reason + message
	}
	return reason + ": " + message
}
