// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kube connects services to the Kubernetes API: it chooses an API server that answers, loads credentials, and
// delivers the objects of a kind and their changes.
//
// The API may be unreachable at any time and for any length of time. This neither ends a process nor deletes an
// object: listed objects stay until the API deletes them. A server that was restored from an older backup, or that
// belongs to another cluster, sends no events to a watch that was opened on the former state. Run compares revisions
// to detect this.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/sluice-net/sluice/kit/version"
)

// dialTimeout limits how long connecting to a server may take before the next server is tried.
const dialTimeout = 5 * time.Second

// silence sets the environment variables from which client-go reads, in seconds, after how much silence on a
// connection it sends an HTTP/2 ping, and how long it waits for the reply. With its defaults, 30 and 15, a server
// that disappears without closing its connections is detected after 45 s.
var silence = map[string]string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS": "10", "HTTP2_PING_TIMEOUT_SECONDS": "10"}

// protobuf is used for built-in kinds; custom resources are served as JSON only.
const protobuf = "application/vnd.kubernetes.protobuf"

// Options configures a Client. All fields are required.
type Options struct {
	Name string // the User-Agent in the servers' logs: "sluice-identity"
	// StateFile stores the addresses of the API servers. Its directory must be writable by this service only. Run
	// updates the file.
	StateFile string
	Log       *slog.Logger
}

// Client connects to the Kubernetes API.
type Client struct {
	// Config is for clients of the API. Copy it before changing it.
	Config *rest.Config
	// credentials describes the source of the credentials, and what to do if a server rejects them.
	credentials string
	addresses   *addresses
	monitor     *monitor
	log         *slog.Logger
}

// New returns a client. It reads the credentials, but opens no connection.
func New(s Settings, o Options) (*Client, error) {
	// Follow logs failures itself; client-go's own log is discarded.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	cfg, configured, err := s.load()
	if err != nil {
		return nil, err
	}
	for name, seconds := range silence {
		if _, set := os.LookupEnv(name); !set {
			if err := os.Setenv(name, seconds); err != nil {
				return nil, err
			}
		}
	}
	cfg.UserAgent = o.Name + "/" + version.Get().String()
	cfg.QPS, cfg.Burst = 20, 40
	cfg.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
	c := &Client{
		Config: cfg, credentials: s.credentials(cfg), log: o.Log,
		addresses: newAddresses(configured, o.StateFile, o.Log),
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return newFailover(next, c.addresses) })
	core, err := c.REST(schema.GroupVersion{Version: "v1"}, metav1.AddMetaToScheme)
	if err != nil {
		return nil, err
	}
	c.monitor = newMonitor(apiProber{core}, o.Log)
	return c, nil
}

// load reads the credentials and the configured addresses.
func (s *Settings) load() (*rest.Config, []string, error) {
	if s.Kubeconfig != "" {
		rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: s.Kubeconfig}
		cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
		if err != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: %w", s.Kubeconfig, err)
		}
		if cfg.ExecProvider != nil || cfg.AuthProvider != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: users: exec and auth-provider are not supported: "+
				"this service executes nothing", s.Kubeconfig)
		}
		if err := checkAddress(cfg.Host); err != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: clusters: server: %w", s.Kubeconfig, err)
		}
		return cfg, []string{cfg.Host}, nil
	}
	if !s.Enabled() {
		return nil, nil, errors.New("kubernetes.api: no address of an API server")
	}
	for key, file := range map[string]string{"token": s.Token, "ca": s.CA} {
		if _, err := os.ReadFile(file); err != nil {
			return nil, nil, fmt.Errorf("kubernetes.%s: %w", key, err)
		}
	}
	return &rest.Config{
		Host: s.API[0], BearerTokenFile: s.Token, TLSClientConfig: rest.TLSClientConfig{CAFile: s.CA},
	}, s.API, nil
}

// credentials describes the source of the credentials. client-go rereads files, but never the kubeconfig itself.
func (s *Settings) credentials(cfg *rest.Config) string {
	switch {
	case s.Kubeconfig == "":
		return "kubernetes.token: " + s.Token + ": is read again within a minute after it was replaced"
	case cfg.BearerTokenFile != "":
		return "kubernetes.kubeconfig: " + cfg.BearerTokenFile + ": is read again within a minute after it was replaced"
	}
	return "kubernetes.kubeconfig: " + s.Kubeconfig + ": is read when this service starts; restart it if the file has " +
		"changed, or name files there (tokenFile, client-certificate)"
}

// refused adds the source of the credentials to an Unauthorized error.
func (c *Client) refused(err error) error {
	if apierrors.IsUnauthorized(err) {
		return fmt.Errorf("%w: the credentials are refused (%s)", err, c.credentials)
	}
	return err
}

// Files returns the directories that contain the credentials. Rotation replaces files in them, so granting access to
// the files alone is not enough.
func (c *Client) Files() (directories []string) {
	t := c.Config.TLSClientConfig
	for _, file := range []string{c.Config.BearerTokenFile, t.CAFile, t.CertFile, t.KeyFile} {
		if file != "" {
			directories = append(directories, filepath.Dir(file))
		}
	}
	return directories
}

// REST returns a client for one group and version of the API. It knows only the types that add registers, and so
// needs far less memory than a clientset.
func (c *Client) REST(gv schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	cfg := rest.CopyConfig(c.Config)
	cfg.GroupVersion, cfg.APIPath = &gv, "/apis"
	if gv.Group == "" {
		cfg.APIPath = "/api"
	}
	cfg.ContentType, cfg.AcceptContentTypes = protobuf, protobuf+",application/json"
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(cfg)
}

// Servers returns the IP addresses of the API servers, sorted: the configured ones, and the ones that the API
// published most recently, possibly before a restart. Configured host names are left out. The channel is closed when
// the list changes, which happens only while Run runs.
func (c *Client) Servers() (addresses []netip.Addr, changed <-chan struct{}) {
	return c.addresses.hosts()
}

// Nodes returns the number of Nodes in the cluster. Until Run has counted them, it returns the number of a large
// cluster.
func (c *Client) Nodes() int {
	c.monitor.mu.Lock()
	defer c.monitor.mu.Unlock()
	return c.monitor.size()
}

// Cluster reads the cluster's UID, which is the UID of the Namespace kube-system.
func (c *Client) Cluster(ctx context.Context) (string, error) {
	o, err := c.monitor.prober.origin(ctx)
	if err == nil && o.uid == "" {
		err = errors.New("the Kubernetes API has no Namespace kube-system")
	}
	return string(o.uid), err
}

// Run keeps the server addresses up to date, and makes every Follow of this client list again after a server was
// restored from an older backup. It returns nil when ctx is done.
func (c *Client) Run(ctx context.Context) error {
	slices, err := c.apiServers()
	if err != nil {
		return err
	}
	var checks sync.WaitGroup
	checks.Go(func() { c.monitor.run(ctx) })
	err = Follow(ctx, c, slices, &servers{addresses: c.addresses}, c.log)
	checks.Wait()
	return err
}
